"""liger-kernel's layers in policy and reference: what is refused, and that they compute the same."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import tiny
import torch

from benchmarks import architectures
from benchmarks.launches import meta_gpu
from fastgrpo.policy import device
from fastgrpo.policy import liger_layers as liger
from fastgrpo.policy.attention import PackedAttention
from fastgrpo.policy.dry_run import dry_run
from fastgrpo.policy.liger_layers import apply_liger
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import frozen_copy


@pytest.fixture(autouse=True)
def asked_anew():
    device.package_obstacle.cache_clear()
    yield
    device.package_obstacle.cache_clear()


def test_on_a_cpu_it_is_off_unless_asked_for():
    model = tiny.model()
    assert not apply_liger(model)
    with pytest.raises(ValueError, match="use_liger_kernel=True needs a CUDA device"):
        apply_liger(model, True)


def on_a_gpu(model_type):
    config = SimpleNamespace(model_type=model_type)
    return SimpleNamespace(device=torch.device("cuda"), config=config, parameters=list)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert not apply_liger(on_a_gpu("qwen2"))
    with pytest.raises(ValueError, match=r"pip install 'fastgrpo\[train\]'"):
        apply_liger(on_a_gpu("qwen2"), True)


def test_what_keeps_a_gpu_from_it_is_said(monkeypatch, caplog):
    monkeypatch.setattr(liger, "package_obstacle", lambda module: "needs a package that loads: liger_kernel does not")
    assert not apply_liger(on_a_gpu("qwen2")) and not apply_liger(on_a_gpu("qwen2"), False)
    assert not apply_liger(tiny.model())
    assert [record.getMessage() for record in caplog.records] == [
        "liger-kernel is not used, so layers are slower: it needs a package that loads: liger_kernel does not"
    ]


def test_an_unknown_architecture_is_named():
    pytest.importorskip("liger_kernel")
    with pytest.raises(ValueError, match=r"does not know the architecture gpt2; it knows .*qwen2"):
        apply_liger(on_a_gpu("gpt2"), True)
    assert not apply_liger(on_a_gpu("gpt2"))


def test_an_architecture_without_its_rotary_embedding_gets_the_rest(monkeypatch, caplog):
    """As liger-kernel 0.8.5 has it for Qwen3.5 and GLM-4: it raises NotImplementedError where it is asked for one."""
    asked = []

    def apply(model, rope, **parts):
        asked.append((rope, parts["rms_norm"], parts["swiglu"], parts["fused_linear_cross_entropy"]))
        if rope:
            raise NotImplementedError("liger_rotary_pos_emb is not available for Glm4 models.")

    library = ModuleType("liger_kernel.transformers")
    library._apply_liger_kernel_to_instance = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", library)
    monkeypatch.setattr(liger, "_obstacle", lambda model, device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with caplog.at_level("INFO"):
        assert apply_liger(on_a_gpu("glm4"), True)
    assert asked == [(True, True, True, False), (False, True, True, False)]
    assert "fused RMSNorm and SwiGLU for glm4" in caplog.text


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_stay_as_they_are(name, caplog):
    """liger-kernel's read the number of tokens of each expert on the host, which no CUDA graph allows."""
    pytest.importorskip("liger_kernel")
    with meta_gpu(f"transformers.models.{name}.modeling_{name}"), caplog.at_level("INFO"):
        model = architectures.tiny_model(name)
        assert apply_liger(model) and dry_run(model) == (None, True)
        assert dry_run(architectures.tiny_model(name)) == (None, True)  # a later one has what the first one has
        assert f"fused RMSNorm and rotary embedding for {name}" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral"])
def test_outputs_and_gradients_agree(architecture):
    pytest.importorskip("liger_kernel")
    model = tiny.model(architecture).cuda()
    ids, positions = torch.arange(5, 17, device="cuda"), torch.cat([torch.arange(8), torch.arange(4)]).cuda()
    mixed = torch.randn(12, 32, device="cuda")

    def run(model):
        model.zero_grad()
        states = Policy.of(model).states(ids, positions, PackedAttention([8, 4], ids.device))
        (states * mixed).sum().backward()
        return states.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected, gradients = run(model)
    assert apply_liger(model, True)
    states, fused = run(model)
    torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused[name], gradient, atol=2e-3, rtol=2e-3, msg=name)
    with torch.no_grad():
        copy = frozen_copy(model)
        assert torch.equal(Policy.of(copy).states(ids, positions, PackedAttention([8, 4], ids.device)), states)
