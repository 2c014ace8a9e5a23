"""Drawing a token: the distribution, with each filter, the random numbers, and what is refused."""

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from fastgrpo.rollout.sampling import SamplingParams, filter_logps, penalize, sample, sample_penalized, uniforms


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2),
        ("max_tokens", 0),
        ("repetition_penalty", 0),
    ],
)
def test_refused_sampling(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("top_k", 2.5, "top_k must be an integer, got 2.5"),
        ("max_tokens", 2.5, "max_tokens must be an integer, got 2.5"),
        ("seed", 1.5, "seed must be an integer, got 1.5"),
        ("seed", "0", "seed must be an integer, got '0'"),
        ("stop_token_ids", 1, "stop_token_ids must be a list of integers, got 1"),
        ("stop_token_ids", "</s>", "stop_token_ids must be a list of integers, got '</s>'"),
        ("stop_token_ids", [1.5], r"stop_token_ids must be a list of integers, got \[1.5\]"),
    ],
)
def test_what_counts_is_an_integer(name, value, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        SamplingParams(**{name: value})


def test_integers_of_any_kind_and_no_stop_tokens():
    assert SamplingParams(stop_token_ids=None) == SamplingParams()
    given = SamplingParams(top_k=np.int64(5), stop_token_ids=torch.tensor([1, 2]), seed=np.int32(3))
    assert given == SamplingParams(top_k=5, stop_token_ids=(1, 2), seed=3)


def expected_distribution(logits, params):
    """The filters in plain Python, token by token."""
    probs = torch.softmax(logits.double() / params.temperature, -1).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    if params.top_k:
        order = order[: params.top_k]
    kept, mass, total = [], 0.0, sum(probs[i] for i in order)
    for i in order:
        if mass < params.top_p:
            kept.append(i)
        mass += probs[i] / total
    kept = [i for i in kept if probs[i] >= params.min_p * probs[order[0]]]
    total = sum(probs[i] for i in kept)
    return torch.tensor([probs[i] / total if i in kept else 0.0 for i in range(len(probs))])


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.15}, {"top_k": 6, "top_p": 0.7, "min_p": 0.1}],
)
def test_draws_follow_the_distribution(filters):
    params = SamplingParams(**filters)
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 1.5
    expected = expected_distribution(logits, params)
    count = 40_000
    draws = uniforms(11, 0, 1, count)[0]
    tokens, logps, kept = sample(logits.expand(count, -1), draws, **params.distribution)
    seen = torch.bincount(tokens, minlength=12)
    assert seen[expected == 0].sum() == 0
    allowed = expected > 0
    chi_square = ((seen[allowed] - count * expected[allowed]) ** 2 / (count * expected[allowed])).sum()
    # 99.9% quantile of chi-square with at most 11 degrees of freedom is 31.3.
    assert chi_square < 31.3
    full = torch.log_softmax(logits / params.temperature, -1)
    torch.testing.assert_close(logps, full[tokens])
    torch.testing.assert_close(kept, full.exp()[expected > 0].sum().expand(count))
    assert params.filters == (len(filters) > 0 and "temperature" not in filters)


def test_top_p_keeps_the_likeliest_token_whatever_p():
    kept = filter_logps(torch.log(torch.tensor([[0.1, 0.6, 0.3]])), top_p=1e-6)
    assert kept.isfinite().tolist() == [[False, True, False]]


def test_equal_tokens_stay_or_go_together():
    logps = torch.log(torch.tensor([[0.3, 0.2, 0.2, 0.2, 0.1]]))
    assert filter_logps(logps, top_k=2).isfinite().tolist() == [[True, True, True, True, False]]
    assert filter_logps(logps, top_p=0.4).isfinite().tolist() == [[True, True, True, True, False]]
    assert logps.isfinite().all()


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
def test_a_token_without_probability_is_never_drawn(u):
    logits = torch.full((1, 50), -torch.inf)
    logits[0, 20:30] = torch.linspace(0, 1, 10)
    tokens, logps, _ = sample(logits, torch.tensor([u]))
    assert 20 <= tokens.item() < 30 and logps.isfinite().all()
    tokens, _, kept = sample(logits, torch.tensor([u]), top_k=1)
    assert tokens.item() == 29 and 0 < kept.item() < 1
    logits = torch.randn(5000, 50, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 30:] = -torch.inf
    tokens, logps, _ = sample(logits, torch.full((5000,), u), top_k=20)
    assert logps.isfinite().all() and (tokens < 30).all()


@pytest.mark.parametrize("vocabulary", [7, 128, 129, 300, 151_936])
def test_tokens_and_log_probs_are_those_of_fp64(vocabulary):
    """Vocabularies of part of a block, of a whole one, of two, of three, and of many: Qwen's."""
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


def test_a_row_is_drawn_alike_alone_and_beside_others():
    logits = torch.randn(9, 50_000, generator=torch.Generator().manual_seed(0)) * 3
    draws = torch.rand(9, generator=torch.Generator().manual_seed(1))
    together = sample(logits, draws)
    for row in range(9):
        alone = sample(logits[row : row + 1], draws[row : row + 1])
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True))


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
def test_blocks_of_tokens_without_probability_are_passed_over(u, filters):
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, 300:310] = torch.linspace(0, 1, 10)
    logits[1, 600] = torch.nan
    tokens, logps, _ = sample(logits, torch.full((2,), u), **filters)
    assert (306 if filters else 300) <= tokens[0] < 310 and logps[0].isfinite()
    assert logps[1].isnan() and 0 <= tokens[1] < 1000


def test_greedy_takes_the_likeliest_at_temperature_1():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.5, 0.1, 0.2]])
    tokens, logps, kept = sample(logits, torch.tensor([0.9, 0.9]), temperature=0)
    assert tokens.tolist() == [1, 0] and kept.tolist() == [1, 1]
    torch.testing.assert_close(logps, torch.log_softmax(logits, -1).amax(-1))
    logits = torch.zeros(1, 150_000)
    logits[0, 100], logits[0, 70_000] = 0.1, 0.1000004  # log-probs near -12 cannot tell them apart
    assert sample(logits, torch.tensor([0.0]), temperature=0)[0].item() == 70_000


def test_a_request_and_a_position_key_a_random_number():
    numbers = uniforms(seed=3, request_id=9, count=4, length=50)
    assert numbers.shape == (4, 50) and numbers.dtype == torch.float32
    assert numbers.min() >= 0 and numbers.max() < 1 and 0.4 < numbers.mean() < 0.6
    assert torch.equal(uniforms(3, 9, 4, 20), numbers[:, :20])
    for other in (uniforms(4, 9, 4, 50), uniforms(3, 10, 4, 50), uniforms(-1, 9, 4, 50)):
        assert not torch.equal(other, numbers)
    assert len(numbers.flatten().unique()) > 190


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_penalty_is_that_of_transformers(penalty):
    torch.manual_seed(3)
    logits, ids = torch.randn(5, 40) * 3, torch.randint(40, (5, 12))
    logits[0, ids[0, 0]] = 0.0
    seen = torch.zeros(5, 40, dtype=torch.bool).scatter_(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    assert torch.equal(penalize(logits, seen, penalty), expected) and not expected.equal(logits)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7, "min_p": 0.05}], ids=str)
def test_penalized_draws_follow_their_distribution(filters):
    """exp(logp) is the policy's probability, and exp(logp) / kept the one that the token was drawn with."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 1.5, -0.3, 0.9]])
    seen = torch.tensor([[True, True, False, True, False, False]])
    how = {"repetition_penalty": 1.8, "temperature": 1.4, **filters}
    points = (torch.arange(20000) + 0.5) / 20000
    tokens, logps, kept = sample_penalized(logits.expand(20000, -1), seen.expand(20000, -1), points, **how)
    drawn_from = filter_logps((penalize(logits, seen, 1.8) / 1.4).log_softmax(-1), **filters).softmax(-1)[0]
    shares = torch.bincount(tokens, minlength=6) / 20000
    torch.testing.assert_close(shares, drawn_from, atol=2e-4, rtol=0)
    policy = (logits / 1.4).softmax(-1)[0]
    torch.testing.assert_close(logps.exp(), policy[tokens])
    torch.testing.assert_close(logps.exp() / kept, drawn_from[tokens])
    assert filters or kept.max() > 1  # of a token that the penalty made less likely


def test_a_greedy_penalized_draw_keeps_the_policys_log_prob():
    logits, seen = torch.tensor([[3.0, 2.9, -1.0]]), torch.tensor([[True, False, True]])
    (token,), (logp,), _ = sample_penalized(logits, seen, torch.zeros(1), repetition_penalty=1.1, temperature=0)
    assert token == 1 and logp == pytest.approx(logits.log_softmax(-1)[0, 1].item())
    assert sample(logits, torch.zeros(1), temperature=0)[0] == 0
