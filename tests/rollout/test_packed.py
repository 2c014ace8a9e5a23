"""Weights packed for rollouts on a CPU: the same logits, fresh after each update, gone after the rollout."""

import copy

import pytest
import tiny
import torch
from drawing import PROMPTS

from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.weights import PACKED_FROM, PackedWeights, _packed, packable

LONG = SamplingParams(max_tokens=PACKED_FROM, seed=0)


def can_pack(dtype=torch.float32):
    return packable(Policy.of(tiny.model().to(dtype)))


needs_packing = pytest.mark.skipif(not can_pack(), reason="torch has no oneDNN here")


def linear_layers(model):
    return [module for module in model.modules() if type(module) is torch.nn.Linear]


def computed(policy, packed):
    """Return the states and logits of a batch, computed with the packed weights where there are any."""
    batch = Batch.pack([Sample(prompt, [3, 4, 5], advantage=0.0) for prompt in PROMPTS], policy.device)
    with torch.inference_mode(), packed.in_use() as product:
        states = policy.completion_states(batch)
        return states, policy.logits(states, product)


@needs_packing
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_packed_weights_give_the_same_states_and_logits(architecture):
    policy = Policy.of(tiny.model(architecture))
    packed = PackedWeights(policy)
    plain = computed(policy, packed)
    packed.pack()
    assert len(packed.forwards) >= 2 * policy.shape.num_hidden_layers
    for found, expected in zip(computed(policy, packed), plain, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@needs_packing
def test_the_layers_and_the_head_compute_with_the_copies():
    """What is written to the weights after the copy does not show, as long as it is in use."""
    policy = Policy.of(tiny.model("llama"))
    packed = PackedWeights(policy)
    packed.pack()
    before = computed(policy, packed)
    with torch.no_grad():
        for layer in linear_layers(policy.module):
            layer.weight.zero_()
    assert all(torch.equal(*pair) for pair in zip(computed(policy, packed), before, strict=True))
    packed.free()
    assert not computed(policy, packed)[1].any()


@needs_packing
def test_a_layer_of_another_dtype_keeps_its_product():
    policy = Policy.of(tiny.model("llama"))
    policy.module.model.layers[0].mlp.down_proj.double()
    packed = PackedWeights(policy)
    packed.pack()
    assert len(packed.forwards) == len(linear_layers(policy.module)) - 2  # nor is the head among them


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this CPU has no bf16 products of oneDNN")
def test_the_head_of_a_bf16_policy_multiplies_in_fp32():
    policy = Policy.of(tiny.model("llama").bfloat16())
    packed = PackedWeights(policy)
    packed.pack()
    states, logits = computed(policy, packed)
    assert states.dtype == torch.bfloat16 and logits.dtype == torch.float32
    exact = states.double() @ policy.head.weight.double().T
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)
    plain = computed(policy, PackedWeights(policy))[0]
    torch.testing.assert_close(states, plain, atol=0.05, rtol=0.02)  # a few roundings to bf16


@needs_packing
def test_biases_and_adapters_are_added():
    model = add_lora(tiny.model("qwen2"), r=2, target_modules=["q_proj", "up_proj"])  # its projections have biases
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    policy = Policy.of(model)
    packed = PackedWeights(policy)
    plain = computed(policy, packed)
    packed.pack()
    torch.testing.assert_close(computed(policy, packed), plain, atol=1e-4, rtol=1e-4)


@needs_packing
def test_a_rollout_packs_the_weights_as_they_are_and_frees_them():
    model = tiny.model("llama")
    engine = RolloutEngine(model)
    for _ in range(2):
        engine.add_request(PROMPTS[0], 2, LONG)
        engine.step()
        held = engine.weights.packed
        assert len(held.forwards) == len(linear_layers(model)) - 1 and held.head is not None  # the head is apart
        while engine.has_unfinished_requests():
            engine.step()
        assert not held.forwards and held.head is None
        drawn = engine.generate(PROMPTS, 2, LONG)
        fresh = RolloutEngine(copy.deepcopy(model)).generate(PROMPTS, 2, LONG)
        assert [rollout.ids for rollout in drawn] == [rollout.ids for rollout in fresh]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3)


@needs_packing
def test_a_rollout_of_one_completion_at_a_time_packs_once(monkeypatch):
    engine, packed = RolloutEngine(tiny.model("llama"), max_num_seqs=1), []
    monkeypatch.setattr("fastgrpo.rollout.weights._packed", lambda weight: packed.append(1) or _packed(weight))
    engine.generate(PROMPTS, 1, LONG)
    assert len(PROMPTS) > 1 and len(packed) == len(linear_layers(engine.policy.module))


@needs_packing
def test_packed_weights_serve_the_passes_of_the_engine_alone():
    """Whoever calls the model while requests are in flight gets torch's own products, with gradients."""
    model = tiny.model("llama")
    before = model(torch.tensor([PROMPTS[0]])).logits
    engine = RolloutEngine(model)
    engine.add_request(PROMPTS[0], 2, LONG)
    engine.step()
    assert engine.weights.packed.forwards
    after = model(torch.tensor([PROMPTS[0]])).logits
    assert torch.equal(after, before) and after.requires_grad


@needs_packing
def test_a_pass_that_fails_leaves_the_layers_as_they_were(monkeypatch):
    model = tiny.model("llama")
    engine = RolloutEngine(model)

    def fails(*args):
        assert all("forward" in vars(layer) for layer, _ in engine.weights.packed.forwards)
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.policy, "states", fails)
    engine.add_request(PROMPTS[0], 2, LONG)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    assert not any("forward" in vars(layer) for layer in linear_layers(model))


@needs_packing
def test_a_layer_whose_forward_function_was_replaced_keeps_it():
    model = tiny.model("llama")
    layer, calls = model.model.layers[0].mlp.down_proj, []
    plain = layer.forward
    layer.forward = lambda states: (calls.append(1), plain(states))[1]
    RolloutEngine(model).generate(PROMPTS, 2, LONG)
    assert len(calls) >= PACKED_FROM and "forward" in vars(layer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_not_packed(dtype):
    assert not can_pack(dtype)


def test_nothing_is_packed_without_onednn_or_for_short_completions():
    with torch.backends.mkldnn.flags(enabled=False):
        assert not can_pack()
    engine = RolloutEngine(tiny.model("llama"))
    engine.add_request(PROMPTS[0], 2, SamplingParams(max_tokens=PACKED_FROM - 1))
    engine.step()
    assert not engine.weights.packed.forwards
