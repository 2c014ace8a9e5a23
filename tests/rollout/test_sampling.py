"""Drawing a token: the distribution, with each filter, the random numbers, and what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastgrpo.rollout.sampling import SamplingParams, filter_logps, sample, sample_penalized, uniforms

VALID = {
    "temperature": st.floats(0.05, 20.0), "top_k": st.integers(0, 50), "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1), "repetition_penalty": st.floats(0.1, 10),
}  # fmt: skip
INVALID = {
    "temperature": [-0.1, math.nan, math.inf, "1", True, None], "top_k": [-1, 2.5], "top_p": [0, -0.1, 1.1, math.nan],
    "min_p": [-0.1, 1.1, None], "repetition_penalty": [0, -1.0, math.inf], "max_tokens": [0, 2.5, None],
    "seed": [1.5, "0"], "stop_token_ids": [1, "</s>", [1.5]],
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_rejects_values_out_of_their_interval(name):
    for value in INVALID[name]:
        with pytest.raises(ValueError, match=f"^{name} "):
            SamplingParams(**{name: value})


def test_integers_of_any_kind_and_no_stop_tokens():
    assert SamplingParams(stop_token_ids=None) == SamplingParams()
    given = SamplingParams(top_k=np.int64(5), stop_token_ids=torch.tensor([1, 2]), seed=np.int32(3))
    assert given == SamplingParams(top_k=5, stop_token_ids=(1, 2), seed=3)


def support(probs, top_k, top_p, min_p):
    """The filters in plain Python: the tokens that may be drawn."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    order = order[:top_k] if top_k else order
    total, mass, kept = sum(probs[i] for i in order), 0.0, []
    for i in order:
        if mass < top_p:
            kept.append(i)
        mass += probs[i] / total
    return {i for i in kept if probs[i] >= min_p * probs[order[0]]}


def clear_support(probs, top_k, top_p, min_p):
    """The tokens that may be drawn, where no boundary of a filter is so near to a token that rounding decides."""
    near = [support(probs, top_k, top_p * (1 + e), min_p * (1 - e)) for e in (-1e-4, 0, 1e-4)]
    assume(near[0] == near[1] == near[2])
    return near[1]


LOGITS = st.tuples(st.integers(0, 1000), st.integers(1, 40), st.floats(0.1, 6))


def random_logits(seed, vocabulary, scale):
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


POINTS = torch.cat([(torch.arange(1000) + 0.5) / 1000, torch.tensor([0.0, 1 - 2**-24])])


def check_draws(draw, probs, policy, kept):
    """Tokens at equally spaced points are drawn as often as `probs` [V] says; log-probs are those of `policy` [V]."""
    tokens, logps, mass = draw
    shares = torch.bincount(tokens, minlength=len(probs)) / len(tokens)
    torch.testing.assert_close(shares.double(), probs, atol=5e-3, rtol=0)
    assert {*tokens.tolist()} <= set(kept)
    torch.testing.assert_close(logps.double(), policy.log()[tokens], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close((logps.double().exp() / mass), probs[tokens], atol=1e-6, rtol=1e-3)


@settings(max_examples=120)
@given(LOGITS, *(VALID[name] for name in ("temperature", "top_k", "top_p", "min_p")))
def test_draws_follow_the_distribution(logits, temperature, top_k, top_p, min_p):
    logits, filters = random_logits(*logits), {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    policy = (logits.double() / temperature).softmax(-1)
    kept = sorted(clear_support(policy.tolist(), **filters))
    params = SamplingParams(temperature=temperature, **filters)
    assert params.filters == (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    drawn = sample(logits.expand(len(POINTS), -1), POINTS, **params.distribution)
    probs = torch.zeros_like(policy)
    probs[kept] = policy[kept] / policy[kept].sum()
    check_draws(drawn, probs, policy, kept)
    torch.testing.assert_close(drawn[2].double(), policy[kept].sum().expand(len(POINTS)), atol=1e-6, rtol=1e-5)


@settings(max_examples=60)
@given(LOGITS, VALID["temperature"], st.integers(0, 5), st.floats(0.3, 1), VALID["repetition_penalty"], st.data())
def test_penalized_draws_follow_their_distribution(logits, temperature, top_k, top_p, penalty, data):
    """exp(logp) is the policy's probability, and exp(logp) / kept the one that the token was drawn with."""
    logits = random_logits(*logits)
    seen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits))))
    penalized = torch.where(seen & (logits > 0), logits / penalty, torch.where(seen, logits * penalty, logits))
    probs = (penalized.double() / temperature).softmax(-1)
    kept = sorted(clear_support(probs.tolist(), top_k, top_p, 0.0))
    policy = (logits.double() / temperature).softmax(-1)
    assume(policy[kept].min() > 1e-30)
    how = {"repetition_penalty": penalty, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawn = sample_penalized(logits.expand(len(POINTS), -1), seen.expand(len(POINTS), -1), POINTS, **how)
    drawn_from = torch.zeros_like(probs)
    drawn_from[kept] = probs[kept] / probs[kept].sum()
    check_draws(drawn, drawn_from, policy, kept)


@pytest.mark.parametrize("top_p", [1e-6, 1e-300])
def test_top_p_keeps_the_likeliest_token_whatever_p(top_p):
    kept = filter_logps(torch.log(torch.tensor([[0.1, 0.6, 0.3]])), top_p=top_p)
    assert kept.isfinite().tolist() == [[False, True, False]]


def test_equal_tokens_stay_or_go_together():
    logps = torch.log(torch.tensor([[0.3, 0.2, 0.2, 0.2, 0.1]]))
    assert filter_logps(logps, top_k=2).isfinite().tolist() == [[True, True, True, True, False]]
    assert filter_logps(logps, top_p=0.4).isfinite().tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
def test_a_token_without_probability_is_never_drawn(u, filters):
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, 300:310] = torch.linspace(0, 1, 10)
    logits[1, 600] = torch.nan
    tokens, logps, _ = sample(logits, torch.full((2,), u), **filters)
    assert (306 if filters else 300) <= tokens[0] < 310 and logps[0].isfinite()
    assert logps[1].isnan() and 0 <= tokens[1] < 1000


@pytest.mark.parametrize("vocabulary", [7, 128, 129, 300, 151_936])
def test_tokens_and_log_probs_are_those_of_fp64(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(16, vocabulary, generator=generator) * 4
    draws = torch.rand(16, generator=generator)
    draws[:2] = torch.tensor([0.0, 1 - 2**-24])
    tokens, logps, kept = sample(logits, draws)
    exact = logits.double().log_softmax(-1)
    at_token, ends = exact.gather(1, tokens[:, None])[:, 0], exact.exp().cumsum(-1)
    ends = ends.gather(1, tokens[:, None])[:, 0]
    assert (ends > draws - 3e-7).all() and (ends - at_token.exp() < draws + 3e-7).all()
    torch.testing.assert_close(logps.double(), at_token, rtol=0, atol=3e-6)
    torch.testing.assert_close(kept, torch.ones(16))
    for row in range(0, 16, 5):
        alone = sample(logits[row : row + 1], draws[row : row + 1])
        assert alone[0][0] == tokens[row] and alone[1][0] == logps[row]


def test_greedy_takes_the_likeliest_at_temperature_1():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.5, 0.1, 0.2]])
    tokens, logps, kept = sample(logits, torch.tensor([0.9, 0.9]), temperature=0)
    assert tokens.tolist() == [1, 0] and kept.tolist() == [1, 1]
    torch.testing.assert_close(logps, torch.log_softmax(logits, -1).amax(-1))
    logits = torch.zeros(1, 150_000)
    logits[0, 100], logits[0, 70_000] = 0.1, 0.1000004  # log-probs near -12 cannot tell them apart
    assert sample(logits, torch.tensor([0.0]), temperature=0)[0].item() == 70_000
    logits, seen = torch.tensor([[3.0, 2.9, -1.0]]), torch.tensor([[True, False, True]])
    (token,), (logp,), _ = sample_penalized(logits, seen, torch.zeros(1), repetition_penalty=1.1, temperature=0)
    assert token == 1 and logp == pytest.approx(logits.log_softmax(-1)[0, 1].item())  # the policy's log-prob


def test_a_request_and_a_position_key_a_random_number():
    numbers = uniforms(seed=3, request_id=9, count=4, length=50)
    assert numbers.shape == (4, 50) and numbers.dtype == torch.float32
    assert numbers.min() >= 0 and numbers.max() < 1 and 0.4 < numbers.mean() < 0.6
    assert torch.equal(uniforms(3, 9, 4, 20), numbers[:, :20])
    for other in (uniforms(4, 9, 4, 50), uniforms(3, 10, 4, 50), uniforms(-1, 9, 4, 50)):
        assert not torch.equal(other, numbers)
    assert torch.equal(uniforms(3, 9, 2, 100).T.flatten(), numbers.T.flatten())  # laid out by the group size
    assert len(numbers.flatten().unique()) > 190
