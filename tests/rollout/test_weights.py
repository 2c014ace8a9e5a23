"""Weights packed for rollouts on a CPU: the same logits, fresh after each update, gone after the rollout."""

import copy

import pytest
import tiny
import torch
from drawing import PROMPTS, finish, ids_of

from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.attention import PackedAttention
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.layers import KNOWN
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.weights import PACKED_FROM, PackedWeights, packable

LONG = SamplingParams(max_tokens=PACKED_FROM, seed=0)


def can_pack(dtype=torch.float32):
    return packable(Policy.of(tiny.model().to(dtype)))


needs_packing = pytest.mark.skipif(not can_pack(), reason="torch has no oneDNN here")


def computed(policy, packed):
    batch = Batch.pack([Sample(prompt, [3, 4, 5], advantage=0.0) for prompt in PROMPTS], policy.device)
    context = PackedAttention(batch.lengths, policy.device, batch.branches)
    with torch.inference_mode(), packed.in_use() as product:
        states = (packed.layers or policy).states(batch.input_ids, batch.position_ids, context)
        return states, policy.logits(states, product)


def with_biases_and_adapters():
    model = add_lora(tiny.model("qwen2"), r=2, target_modules=["q_proj", "up_proj"])  # its projections have biases
    return tiny.stir(model, "bias", "lora_B", std=0.3)


@needs_packing
@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES, "adapters"])
def test_packed_weights_give_the_same_states_and_logits(name):
    policy = Policy.of(with_biases_and_adapters() if name == "adapters" else tiny.model(name))
    packed = PackedWeights(policy)
    plain = computed(policy, packed)
    packed.pack()
    if type(policy.module).__name__ in KNOWN:
        assert packed.layers and not packed.forwards
    else:
        assert len(packed.forwards) >= 2 * policy.shape.num_hidden_layers
    torch.testing.assert_close(computed(policy, packed), plain, atol=1e-5, rtol=1e-5)


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
def test_a_rollout_packs_the_weights_as_they_are_and_frees_them():
    """Whoever calls the model meanwhile gets torch's own products, with gradients."""
    model = tiny.model("llama")
    engine = RolloutEngine(model)
    for _ in range(2):
        before = model(torch.tensor([PROMPTS[0]])).logits
        engine.add_request(PROMPTS[0], 2, LONG)
        engine.step()
        held = engine.weights.packed
        assert held.layers is not None and held.head is not None
        after = model(torch.tensor([PROMPTS[0]])).logits
        assert torch.equal(after, before) and after.requires_grad
        finish(engine)
        assert held.layers is None and held.head is None
        drawn = engine.generate(PROMPTS, 2, LONG)
        fresh = RolloutEngine(copy.deepcopy(model)).generate(PROMPTS, 2, LONG)
        assert ids_of(drawn) == ids_of(fresh)
        tiny.stir(model, std=0.3)
