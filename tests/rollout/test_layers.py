"""The layers of a rollout: parameters that share memory, merged adapters, and weights packed on a CPU."""

import copy

import pytest
import tiny
import torch
from drawing import PROMPTS, finish, ids_of

from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.attention import PackedAttention
from fastgrpo.policy.lora import add_lora, merged_weight
from fastgrpo.policy.model import Policy
from fastgrpo.rollout import weights as weights_module
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.graph import Graphs
from fastgrpo.rollout.layers import KNOWN, Joined, Layers, groups, obstacle
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.weights import PACKED_FROM, HeldWeights, PackedWeights, packable
from fastgrpo.trainer.optim import MasterAdamW

CPU = torch.device("cpu")


def with_adapters(name="qwen2", dtype=torch.float32):
    """A policy with random biases and adapters."""
    model = add_lora(tiny.model(name), r=2, alpha=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    return Policy.of(tiny.stir(model, "bias", "lora_B", std=0.1).to(dtype))


def shared(policy):
    storages = [{linear.weight.untyped_storage().data_ptr() for linear in linears} for linears in groups(policy)]
    return all(len(of_group) == 1 for of_group in storages)


def test_joined_weights_stay_ordinary_parameters(tmp_path):
    policy = Policy.of(tiny.model("qwen2"))
    plain = Policy.of(copy.deepcopy(policy.module))
    trained = [(each, MasterAdamW(each.module, learning_rate=0.01)) for each in (policy, plain)]
    batch = Batch.pack([Sample(prompt, [3, 4, 5], advantage=1.0) for prompt in PROMPTS], CPU)

    def update():
        for each, optimizer in trained:
            each.logps(batch).sum().backward()
            optimizer.step()

    update()
    assert not shared(policy)
    joined = [Joined(linears) for linears in groups(policy)]
    assert shared(policy)
    update()
    for (name, mine), theirs in zip(policy.module.named_parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    update()
    for product, linears in zip(joined, groups(policy), strict=True):  # it sees the update
        assert torch.equal(product.weight, torch.cat([linear.weight for linear in linears]))
    policy.module.save_pretrained(tmp_path)
    loaded = type(policy.module).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in policy.module.state_dict().items())
    policy.load_state_dict(plain.state_dict())  # as a resumed run
    assert shared(policy) and not shared(Policy.of(copy.deepcopy(policy.module)))
    policy.module.double()
    assert not shared(policy)
    again = [Joined(linears) for linears in groups(policy)]
    assert shared(policy) and all(product.weight.dtype == torch.float64 for product in again)


@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_logp_gap_of_adapters_merged_and_apart(name, dtype, most, record_property):
    """The metric sampler/logp_gap_mean: the mean difference of the log-probs to those of the trained policy."""
    policy = with_adapters(name, dtype)
    assert obstacle(policy) is None
    batch = Batch.pack([Sample(prompt, [3, 4, 5], advantage=0.0) for prompt in PROMPTS], CPU)
    context = PackedAttention(batch.lengths, CPU, batch.branches)
    exact = copy.deepcopy(policy.module).double()
    exact = Policy.of(exact).logps(batch).detach()
    merged = [Joined(each, torch.cat([merged_weight(linear) for linear in each])) for each in groups(policy)]
    gaps = {}
    for how, products in {"merged": merged, "apart": [Joined(linears) for linears in groups(policy)]}.items():
        with torch.inference_mode():
            states = Layers(policy, products, fused=False).states(batch.input_ids, batch.position_ids, context)
            found = policy.logps_of(states[batch.rows], batch.targets)
        gaps[how] = (found - policy.logps(batch)).abs().mean().item()
        record_property(f"sampler/logp_gap_mean, {how}", gaps[how])
        error = (policy.logps(batch) - exact).abs().mean()
        assert (found - exact).abs().mean() <= 1.5 * error + 1e-5  # as exact as transformers' own layers
    assert max(gaps.values()) <= most, gaps


def test_a_thousand_updates_of_merged_adapters_never_touch_the_base(monkeypatch):
    monkeypatch.setattr(weights_module, "uses_kernels", lambda policy: True)
    policy = with_adapters(dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in policy.module.state_dict().items() if ".lora_" not in name}
    held = HeldWeights(policy, Graphs(CPU, enabled=False), lambda: 1e9)
    changed = [value for name, value in policy.module.named_parameters() if ".lora_B" in name]
    held.hold(1)
    addresses = {i: each.data_ptr() for i, each in held.copies.items()}
    for _ in range(1000):
        held.release()
        with torch.no_grad():
            torch._foreach_neg_(changed)
        held.hold(1)
    state = policy.module.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in before.items())
    assert {i: each.data_ptr() for i, each in held.copies.items()} == addresses and len(addresses) == 6
    query, key = groups(policy)[0][:2]
    change = query.lora_B["default"].weight.double() @ query.lora_A["default"].weight.double()
    expected = torch.cat([query.base_layer.weight + 2 * change, key.weight]).bfloat16()  # alpha / r is 2
    assert (held.copies[0][: len(expected)] != expected).float().mean() < 1e-3  # fp32 rounds to the other side


def test_adapters_stay_apart_where_their_copies_do_not_fit(monkeypatch):
    monkeypatch.setattr(weights_module, "uses_kernels", lambda policy: True)
    held = HeldWeights(with_adapters(), Graphs(CPU, enabled=False), lambda: 1e4)
    held.hold(1)
    assert held.copies == {} and held.layers.layers[0].qkv.down is not None


def test_models_that_differ_keep_their_own_layers():
    assert obstacle(Policy.of(tiny.model("qwen2", gradient_checkpointing=True))) is None
    assert obstacle(Policy.of(tiny.model("mistral"))) and obstacle(Policy.of(tiny.model("smollm3")))
    watched = tiny.model("qwen2")
    watched.model.layers[1].register_forward_hook(lambda *_: None)
    assert "hooks" in obstacle(Policy.of(watched))
    assert "SiLU" in obstacle(Policy.of(tiny.model("llama", hidden_act="gelu")))


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


@needs_packing
@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES, "adapters"])
def test_packed_weights_give_the_same_states_and_logits(name):
    policy = with_adapters() if name == "adapters" else Policy.of(tiny.model(name))
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
        assert ids_of(drawn) == ids_of(RolloutEngine(copy.deepcopy(model)).generate(PROMPTS, 2, LONG))
        tiny.stir(model, std=0.3)
