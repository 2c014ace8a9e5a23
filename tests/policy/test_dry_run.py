"""The dry run at load: real classes of transformers are refused by name, and models without a fault are not."""

from contextlib import nullcontext
from threading import Thread

import pytest
import tiny
import torch
import triton
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig
from triton.runtime.jit import JITFunction

from benchmarks import architectures
from benchmarks.launches import meta_gpu
from fastgrpo.policy import dry_run as module
from fastgrpo.policy.dry_run import dry_run, without_weights
from fastgrpo.policy.liger_layers import apply_liger
from fastgrpo.policy.load import prepare
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.engine import RolloutEngine

REFUSED = {
    "deepseek_v2": "DeepseekV2ForCausalLM has keys of width 16 and values of width 8",
    "deepseek_v3": "DeepseekV3ForCausalLM has keys of width 16 and values of width 8",
    "nemotron": "NemotronForCausalLM does not get the context that Policy.states hands to the model",
    "gemma2": "Gemma2ForCausalLM has soft-capped attention",
    "gemma4_text": "Gemma4ForCausalLM fails where the engine runs it .*'head_dim' is a per-layer attribute",
    "gpt_oss": "GptOssForCausalLM has attention sinks",
    "lfm2": r"Lfm2ForCausalLM has layers that are not plain attention \(conv\)",
    "doge": "DogeForCausalLM has a mask of its own",
    "diffllama": "DiffLlamaForCausalLM attends more than once in layer 0",
    "jetmoe": r"JetMoeForCausalLM waits for the device in its forward pass \(aten::_to_copy\)",
    "bert": "BertLMHeadModel lets tokens attend to later ones",
    "bloom": "BloomForCausalLM does not use transformers' attention interface",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_cannot_serve_is_refused_by_name(name):
    model = architectures.tiny_model(name)
    with pytest.raises(ValueError, match=f"^{REFUSED[name]}.*: use --rollout_backend hf"):
        prepare(model)
    assert prepare(model, own_attention=True).own_attention


def test_rotary_frequencies_that_follow_the_batch_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="LlamaForCausalLM has dynamic rotary frequencies, which follow"):
        prepare(architectures.tiny_model("llama", rope_parameters=rope))


class Asking(torch.nn.Module):
    """A layer's MLP that looks at its own values."""

    def __init__(self, mlp, ask):
        super().__init__()
        self.mlp, self.ask = mlp, ask

    def forward(self, states):
        self.ask(states)
        return self.mlp(states)


@pytest.mark.parametrize(
    "ask, operator",
    [
        (lambda states: states.sum().item(), "_local_scalar_dense"),
        (lambda states: bool((states > 0).all()), "_local_scalar_dense"),
        (lambda states: states.nonzero(), "nonzero"),
        (lambda states: states[states > 0], "index"),
        (lambda states: states.cpu(), "_to_copy"),
    ],
)
def test_a_layer_that_waits_for_the_device_is_refused_wherever_it_stands(ask, operator):
    model = tiny.model(num_hidden_layers=6)
    model.model.layers[4].mlp = Asking(model.model.layers[4].mlp, ask)
    with pytest.raises(
        ValueError, match=rf"Qwen2ForCausalLM waits for the device in its forward pass \(aten::{operator}\)"
    ):
        prepare(model)


def test_no_wait_is_taken_for_one():
    """Indices without masks select a number of elements that is known, and tensors of the host may be read."""
    model, table = tiny.model(), torch.arange(4)
    layer = model.model.layers[0]
    layer.mlp = Asking(layer.mlp, lambda states: (states[:, torch.tensor([0, 1])], table[table > 1], table[0].item()))
    assert dry_run(model).obstacle is None


@pytest.fixture
def launched(monkeypatch):
    """The names of Triton's kernels that are launched, which here does nothing."""
    names = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: names.append(kernel.__name__))
    return names


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_kernels_of_liger_are_not_launched(launched, monkeypatch, name):
    """On the meta device they would read the null pointer. liger's patches reach later models of the class too."""
    pytest.importorskip("liger_kernel")
    with meta_gpu():
        first = tiny.model(name)
        apply_liger(first, True)
        second = tiny.model(name)  # prepared, so a dry run too
        assert dry_run(first) == dry_run(second) == (None, False)
        assert not launched
        monkeypatch.setattr(module, "no_launches", nullcontext)
        for model in (first, second):
            launched.clear()
            assert dry_run(model) == (None, False)
            assert {"_rms_norm_forward_kernel", "_triton_rope"} <= set(launched)


@triton.jit
def _kernel(x):
    pass


_tuned = triton.autotune([triton.Config({}, num_warps=1), triton.Config({}, num_warps=2)], key=[])(_kernel)


def test_another_thread_goes_on_launching(launched):
    run, tune = JITFunction.run, triton.runtime.autotuner.Autotuner.run
    other = Thread(target=lambda: _kernel[(1,)](torch.ones(1)))
    with module.no_launches():
        _kernel[(1,)](torch.ones(1, device="meta"))
        _tuned[(1,)](torch.ones(1, device="meta"))
        assert not launched and not _tuned.cache
        other.start()
        other.join()
        assert launched == ["_kernel"]
    assert (JITFunction.run, triton.runtime.autotuner.Autotuner.run) == (run, tune)


class Tabled(torch.nn.Module):
    """A layer's MLP with tensors that are neither parameters nor buffers, as code that comes with a model may have."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.scales = mlp, {"by layer": [(torch.ones(32), 7), (torch.ones(32), 8)]}
        self.shifts = [torch.ones(32, requires_grad=True) * 2]  # autograd made it, so deepcopy refuses it

    def forward(self, states):
        return self.mlp(states) * self.scales["by layer"][1][0] + self.shifts[0]


def test_tensors_in_containers_are_left_behind_too():
    model = tiny.model()
    layer = model.model.layers[0]
    layer.mlp = Tabled(layer.mlp)
    assert dry_run(model) == (None, False)
    copied = without_weights(model).model.layers[0].mlp
    (scale, number), _ = copied.scales["by layer"]
    assert scale.is_meta and copied.shifts[0].is_meta and number == 7
    assert not layer.mlp.scales["by layer"][0][0].is_meta and layer.mlp.shifts[0].requires_grad


def test_gpt2_does_not_look_for_its_padding():
    """Its check for padding without a mask would wait for the device in every step."""
    model = architectures.tiny_model("gpt2")
    assert dry_run(model).obstacle is None and model.config.pad_token_id == 0
    with torch.no_grad(), pytest.raises(ValueError, match="waits for the device"), module.OpTrace():
        without_weights(model).base_model(torch.zeros(1, 3, dtype=torch.int64, device="meta"))


def test_the_text_layers_of_a_model_for_images_are_served():
    """Its config holds the text model's, and has no padding token of its own."""
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


def test_the_model_is_left_as_it_is():
    model = tiny.model("qwen3").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    copied = without_weights(model)
    assert all(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers()))
    assert copied.model.embed_tokens.weight.shape == model.model.embed_tokens.weight.shape
    assert dry_run(model).obstacle is None
    assert model.training and model.config._attn_implementation == implementation
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "build, run",
    [
        (lambda: tiny.model(num_hidden_layers=12), 1),  # all alike
        (lambda: tiny.model("smollm3", num_hidden_layers=12, no_rope_layers=[1, 1, 1, 0] * 3), 4),
        (lambda: architectures.tiny_model("glm4_moe", num_hidden_layers=6), 2),  # the first layer is no mixture
    ],
)
def test_one_layer_of_each_kind_is_run(build, run):
    policy = Policy(without_weights(build()))
    assert module._cut(policy) == run == len(policy.module.model.layers)


def test_a_mixture_of_experts_is_known_by_its_products():
    assert dry_run(architectures.tiny_model("qwen3_moe")).grouped
    assert not dry_run(architectures.tiny_model("qwen3")).grouped


def test_a_window_is_refused_when_lengths_are_known():
    policy = prepare(architectures.tiny_model("olmo3"))  # one of its two layers has a window of 128
    policy.check_prompt([5] * 100, 28, "the prompt")
    message = (
        r"the prompt has 100 tokens; with max_tokens=29 it exceeds the sliding window of 128 of Olmo3ForCausalLM.*hf"
    )
    with pytest.raises(ValueError, match=message):
        policy.check_prompt([5] * 100, 29, "the prompt")
    prepare(architectures.tiny_model("olmo3"), own_attention=True).check_prompt([5] * 100, 29, "the prompt")
    whole = prepare(architectures.tiny_model("olmo3", sliding_window=256))  # no shorter than the context
    assert whole.window is None
