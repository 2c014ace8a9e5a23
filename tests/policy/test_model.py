"""`Policy`: its head, its whole weights, its state, and what it cannot hold."""

import pytest
import tiny
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from fastgrpo import linear_logprob
from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.device import cast
from fastgrpo.policy.load import prepare
from fastgrpo.policy.model import Policy

CAP = 2.0
IDS = torch.tensor([5, 9, 20, 7, 11])


def capped():
    """A model whose logits are bent by a soft cap."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, final_logit_softcapping=CAP, sliding_window=64,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(4)
    return prepare(model)


class Alone:
    """One sequence that attends to itself, through transformers' own forward."""

    def __init__(self, policy, ids):
        with torch.no_grad():
            out = policy.module(ids[None], output_hidden_states=True)
        self.states, self.logits = out.hidden_states[-1][0], out.logits[0]


def test_logits_are_those_of_the_model_with_its_soft_cap():
    policy = capped()
    alone = Alone(policy, IDS)
    assert policy.head.softcap == CAP and alone.logits.abs().max() > 0.5 * CAP
    torch.testing.assert_close(policy.logits(alone.states), alone.logits, atol=1e-5, rtol=1e-5)
    uncapped = alone.states @ policy.head.weight.T
    assert (uncapped - alone.logits).abs().max() > 0.1  # else the cap would not show


def test_the_loss_sees_the_soft_cap():
    policy = capped()
    alone = Alone(policy, IDS)
    weight, bias, softcap = policy.head
    logps = linear_logprob(alone.states, weight, IDS, bias=bias, logit_softcap=softcap)
    expected = alone.logits.log_softmax(-1).gather(-1, IDS[:, None])[:, 0]
    torch.testing.assert_close(logps, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_bf16_log_probs_are_off_by_the_rounding_of_the_layers_alone():
    """The same rounded weights in fp32: the states differ by bf16's roundings, and the head adds none of its own.

    A layer rounds about 14 tensors on the way of the residual stream (2 norms of 2, 3 projections, rotation, attention,
    its projection, 4 of the MLP, 2 sums), each by at most u = 2^-8 of itself. Roundings are independent, so R of them
    move a state h by about u sqrt(R) |h|. A state that moves by e moves a log-prob by at most 2 max_v |W_v| |e|.
    """
    policy, exact = (Policy.of(tiny.model("llama")) for _ in range(2))
    cast(policy.module, torch.bfloat16)
    for mine, theirs in zip(exact.parameters(), policy.parameters(), strict=True):
        mine.copy_(theirs)
    ids = torch.randint(3, 60, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = Batch.pack([Sample(ids[:8], ids[8:], advantage=0.0)], torch.device("cpu"))
    states, wide = policy.completion_states(batch), exact.completion_states(batch)
    assert states.dtype == torch.bfloat16
    weight, found = exact.head.weight, policy.logps_of(states, batch.targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact.logps_of(states.float(), batch.targets), rtol=0, atol=1e-6)
    moved = 2**-8 * (14 * exact.shape.num_hidden_layers + 2) ** 0.5 * wide.norm(dim=-1)
    assert ((states - wide).norm(dim=-1) <= moved).all()
    error = (found - exact.logps_of(wide, batch.targets)).abs()
    assert (error <= 2 * weight.norm(dim=-1).max() * moved).all() and error.max() > 0


def test_heads_that_are_not_linear_are_refused():
    model = tiny.model()
    model.config.logits_scaling = 2.0
    with pytest.raises(ValueError, match=r"config.logits_scaling=2.0 changes the head"):
        prepare(model)


def test_gathered_weights_are_views_of_the_parameters():
    policy = Policy(tiny.model())
    parameters = list(policy.module.parameters())
    with policy.gather() as weights:
        assert [w.data_ptr() for w in weights] == [p.data_ptr() for p in parameters]
        versions = [w._version for w in weights]
        with torch.no_grad():
            parameters[0].mul_(2)
        assert [w._version for w in weights] == [versions[0] + 1, *versions[1:]]
        assert not any(w.requires_grad for w in weights)


def test_the_state_comes_back_into_the_same_storage():
    policy, other = Policy(tiny.model(seed=1)), Policy(tiny.model(seed=2))
    places = [p.data_ptr() for p in other.module.parameters()]
    other.load_state_dict(policy.state_dict())
    assert [p.data_ptr() for p in other.module.parameters()] == places
    assert all(torch.equal(a, b) for a, b in zip(policy.module.parameters(), other.module.parameters(), strict=True))
    with pytest.raises(ValueError, match="other modules or shapes"):
        other.load_state_dict(Policy(tiny.model(hidden_size=64)).state_dict())


def test_a_model_is_taken_as_people_hand_it_over():
    model = tiny.model()
    policy = Policy.of(model)
    assert policy.module is model and Policy.of(policy) is policy


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda model: "Qwen/Qwen2.5-0.5B",
            "the policy must be a transformers causal LM with its head, got a str; .*load",
        ),
        (lambda model: model.base_model, "the policy must be a transformers causal LM with its head, got a Qwen2Model"),
        (
            lambda model: torch.nn.DataParallel(model),
            "the policy must be a transformers causal LM with its head, got a DataParallel",
        ),
        (lambda model: None, "the policy must be .* got a NoneType"),
    ],
)
def test_what_is_no_causal_model_is_told_by_name(make, match):
    with pytest.raises(ValueError, match=f"^{match}"):
        Policy.of(make(tiny.model()))


def test_a_compiled_model_is_taken():
    compiled = torch.compile(tiny.model(), backend="eager")
    assert Policy.of(compiled).module is compiled


@pytest.mark.parametrize(
    "ids, match",
    [
        ([], "prompt 3 has no tokens"),
        ([5] * 251, "prompt 3 has 251 tokens; with max_tokens=6 it exceeds the model's context of 256; shorten"),
        ([5, -1], "prompt 3 has the token id -1, which is negative; token ids count from 0"),
        ([64], "prompt 3 has the token id 64, but the model has only 64 embeddings"),
    ],
)
def test_prompts_that_it_cannot_hold(ids, match):
    policy = Policy(tiny.model())
    policy.check_prompt([5] * 250, 6, "prompt 3")
    with pytest.raises(ValueError, match=match):
        policy.check_prompt(ids, 6, "prompt 3")
