"""The dry run at load rejects unsupported classes of transformers by name; liger-kernel's layers compute the same."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig
from triton.runtime.jit import JITFunction

from benchmarks import architectures
from benchmarks.launches import meta_gpu
from fastgrpo.policy import device, liger_layers
from fastgrpo.policy import dry_run as module
from fastgrpo.policy.attention import PackedAttention
from fastgrpo.policy.dry_run import dry_run, without_weights
from fastgrpo.policy.liger_layers import apply_liger
from fastgrpo.policy.load import prepare
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import frozen_copy
from fastgrpo.rollout.engine import RolloutEngine

REFUSED = {
    "deepseek_v2": "head dimension 16 in keys and 8 in values", "nemotron": "does not pass keyword arguments on",
    "gemma2": "soft-capped attention", "gemma4_text": "'head_dim' is a per-layer attribute",
    "gpt_oss": "attention sinks", "lfm2": r"layers that are not plain attention \(conv\)",
    "doge": "a custom attention mask", "diffllama": "attends more than once in layer 0",
    "jetmoe": "syncs with the device", "bert": "lets tokens attend to later ones",
    "bloom": "does not use transformers' attention interface", "llama": "dynamic rotary frequencies",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rejects_unsupported_models_by_name(name):
    rope = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    model = architectures.tiny_model(name, **(rope if name == "llama" else {}))
    with pytest.raises(ValueError, match=f"^{type(model).__name__} .*{REFUSED[name]}.*--rollout_backend hf"):
        prepare(model)
    several = pytest.raises(ValueError, match=r"not depend on cls\.predictions\.transform\.dense\.weight")
    with several if name == "bert" else nullcontext():  # its head has several layers
        assert prepare(model, own_attention=None).own_attention  # rollout_backend=auto


class Asking(torch.nn.Module):
    """A layer's MLP that looks at its own values."""

    def __init__(self, mlp, ask):
        super().__init__()
        self.mlp, self.ask = mlp, ask

    def forward(self, states):
        self.ask(states)
        return self.mlp(states)


@pytest.mark.parametrize("ask", [
    lambda states: bool((states > 0).all()), lambda states: states[states > 0], lambda states: states.cpu(),
])  # fmt: skip
def test_rejects_layers_with_a_host_sync(ask):
    model = tiny.model(num_hidden_layers=6)
    model.model.layers[4].mlp = Asking(model.model.layers[4].mlp, ask)
    with pytest.raises(ValueError, match="syncs with the device"):
        prepare(model)


def test_accepts_indexing_without_a_host_sync():
    model, table = tiny.model(), torch.arange(4)
    layer = model.model.layers[0]
    layer.mlp = Asking(layer.mlp, lambda states: (states[:, torch.tensor([0, 1])], table[table > 1], table[0].item()))
    assert dry_run(model).obstacle is None


def test_kernels_of_liger_are_not_launched(monkeypatch):
    pytest.importorskip("liger_kernel")
    launched = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: launched.append(kernel.__name__))
    with meta_gpu():
        model = tiny.model("qwen3")
        apply_liger(model, True)
        assert dry_run(model) == (None, False)
        assert not launched
        monkeypatch.setattr(module, "no_launches", nullcontext)
        assert dry_run(model) == (None, False)
        assert {"_rms_norm_forward_kernel", "_triton_rope"} <= set(launched)


def test_a_model_of_the_same_architecture_on_a_cpu_keeps_its_own_layers(monkeypatch):
    """A reward model with `--reward_device cpu`, say: liger's kernels would read its addresses on the GPU."""
    pytest.importorskip("liger_kernel")
    judge, ids = tiny.model("qwen3"), torch.arange(5)[None]
    expected, launched = judge(ids).logits, []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: launched.append(kernel.__name__))
    with meta_gpu():
        for _ in range(2):
            policy = tiny.model("qwen3")
            apply_liger(policy, True)
        assert torch.equal(judge(ids).logits, expected) and torch.equal(tiny.model("qwen3")(ids).logits, expected)
        assert not launched
        policy.to("meta")(ids.to("meta"))
    assert {"_rms_norm_forward_kernel", "_triton_rope"} <= set(launched)


def test_copies_a_model_without_weights_and_leaves_it_unchanged():
    model = tiny.model("qwen3").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert dry_run(model) == (None, False)
    copied = without_weights(model)
    assert all(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers()))
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_gpt2_does_not_look_for_its_padding():
    """Its check for padding without a mask would wait for the device in every step."""
    model = architectures.tiny_model("gpt2")
    assert dry_run(model).obstacle is None and model.config.pad_token_id == 0
    with torch.no_grad(), pytest.raises(ValueError, match="syncs with the device"), module.OpTrace():
        without_weights(model).base_model(torch.zeros(1, 3, dtype=torch.int64, device="meta"))


def test_the_text_layers_of_a_model_for_images_are_served():
    image = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = architectures.tiny_model("gemma3_text").config
    config = Gemma3Config(text_config=text.to_dict(), vision_config=image.to_dict(), mm_tokens_per_image=4)
    torch.manual_seed(0)
    policy = prepare(Gemma3ForConditionalGeneration(config))
    assert policy.window == 128
    architectures.agrees(policy, RolloutEngine(policy, max_num_seqs=4))
    assert not hasattr(policy.module.config, "pad_token_id") and policy.shape.pad_token_id == 0


def on_a_gpu(model_type):
    return SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(model_type=model_type), parameters=list)


def test_liger_is_off_where_it_cannot_work_and_refused_where_it_is_asked_for(monkeypatch, caplog):
    for model, obstacle, match in (
        (tiny.model(), None, None), (on_a_gpu("qwen2"), "needs it: pip install", "pip install"),
        (on_a_gpu("gpt2"), None, "gpt2"),
    ):  # fmt: skip
        if match == "gpt2":
            pytest.importorskip("liger_kernel")
        monkeypatch.setattr(liger_layers, "package_obstacle", lambda module, obstacle=obstacle: obstacle)
        caplog.clear()
        assert not apply_liger(model) and not apply_liger(model, False)
        assert len(caplog.records) == (model.device.type == "cuda")  # on a GPU layers are slower without it
        if match is None:  # TRL's scripts set it on any machine
            assert not apply_liger(model, True) and "on a CPU" in caplog.text
            continue
        with pytest.raises(ValueError, match=f"use_liger_kernel=True .*{match}"):
            apply_liger(model, True)


def test_an_architecture_without_its_rotary_embedding_gets_the_rest(caplog):
    pytest.importorskip("liger_kernel")
    device.package_obstacle.cache_clear()
    with meta_gpu("transformers.models.glm4.modeling_glm4"), caplog.at_level("INFO"):
        assert apply_liger(architectures.tiny_model("glm4"), True)
    assert "fused RMSNorm and SwiGLU for glm4" in caplog.text


def test_keeps_mixtures_of_experts_unchanged():
    """liger-kernel's read the number of tokens of each expert on the host, which no CUDA graph allows."""
    pytest.importorskip("liger_kernel")
    device.package_obstacle.cache_clear()
    with meta_gpu("transformers.models.qwen3_moe.modeling_qwen3_moe"):
        model = architectures.tiny_model("qwen3_moe")
        assert apply_liger(model) and dry_run(model) == (None, True)
        assert dry_run(architectures.tiny_model("qwen3_moe")) == (None, True)  # a later one has what the first one has


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral"])
def test_ligers_outputs_and_gradients_agree(architecture):
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
