"""Generation: greedy tokens against transformers' own generate, log-probs against a teacher-forced forward, draws."""

import pytest
import tiny
import torch

from fastgrpo.batch import Sample
from fastgrpo.frozen import score
from fastgrpo.model import head
from fastgrpo.rollout import slots as slots_module
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams, filter_logps, sample

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]


def greedy_of_transformers(model, prompt, max_tokens, stop):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(stop) or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("group_size", [1, 3, 16])
def test_greedy_equals_generate(architecture, group_size):
    model = tiny.model(architecture)
    stop = (1, 20, 33)
    sampling = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=stop)
    rollouts = RolloutEngine(model).generate(PROMPTS, group_size, sampling)
    reasons = set()
    for i, prompt in enumerate(PROMPTS):
        expected = greedy_of_transformers(model, prompt, 24, stop)
        for rollout in rollouts[i * group_size : (i + 1) * group_size]:
            assert rollout.ids == expected
            assert rollout.finish_reason == ("stop" if expected[-1] in stop else "length")
            reasons.add(rollout.finish_reason)
    assert len(rollouts) == len(PROMPTS) * group_size


def test_both_finish_reasons_and_growing_slots(monkeypatch):
    monkeypatch.setattr(slots_module, "GROW", 3)
    model = tiny.model()
    first = greedy_of_transformers(model, PROMPTS[0], 40, ())
    stop = (first[7],)
    rollouts = RolloutEngine(model).generate(
        PROMPTS, 2, SamplingParams(temperature=0, max_tokens=40, stop_token_ids=stop)
    )
    assert rollouts[0].ids == first[: first.index(stop[0]) + 1]
    assert rollouts[0].finish_reason == "stop"
    by_length = [rollout for rollout in rollouts if rollout.finish_reason == "length"]
    assert by_length and all(len(rollout.ids) == 40 and stop[0] not in rollout.ids for rollout in by_length)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_sampled_logps_equal_a_teacher_forced_forward(temperature):
    model = tiny.model("llama")
    sampling = SamplingParams(temperature=temperature, max_tokens=30, stop_token_ids=(1, 2, 3, 4, 5), seed=7)
    rollouts = RolloutEngine(model).generate(PROMPTS, 6, sampling)
    assert len({len(rollout.ids) for rollout in rollouts}) > 3  # rows left at different times
    samples = [Sample(PROMPTS[i // 6], rollout.ids, 1.0) for i, rollout in enumerate(rollouts)]
    for logps, rollout in zip(score(model, samples, temperature, max_tokens=100), rollouts, strict=True):
        assert rollout.logps.dtype == torch.float32
        torch.testing.assert_close(logps, rollout.logps, atol=1e-5, rtol=0)


def test_the_seed_decides():
    engine = RolloutEngine(tiny.model())

    def ids(seed):
        sampling = SamplingParams(max_tokens=12, stop_token_ids=(1,), seed=seed)
        return [rollout.ids for rollout in engine.generate(PROMPTS, 4, sampling)]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


def test_waves_hold_at_most_max_num_seqs(monkeypatch):
    model = tiny.model()
    sampling = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(1,))
    whole = RolloutEngine(model).generate(PROMPTS, 2, sampling)
    engine, sizes = RolloutEngine(model, max_num_seqs=5), []
    wave = engine._wave
    monkeypatch.setattr(
        engine, "_wave", lambda prompts, n, *rest: sizes.append(len(prompts) * n) or wave(prompts, n, *rest)
    )
    finished = []
    in_waves = engine.generate(PROMPTS, 2, sampling, progress=finished.append)
    assert sizes == [4, 4] and finished == [4, 4]
    assert [rollout.ids for rollout in in_waves] == [rollout.ids for rollout in whole]


def test_nothing_of_the_old_weights_survives_an_update():
    model = tiny.model()
    engine = RolloutEngine(model)
    sampling = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(1,))
    before = [rollout.ids for rollout in engine.generate(PROMPTS, 2, sampling)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    after = [rollout.ids for rollout in engine.generate(PROMPTS, 2, sampling)]
    assert after != before
    assert after == [rollout.ids for rollout in RolloutEngine(model).generate(PROMPTS, 2, sampling)]


def test_a_prompt_is_computed_once_a_group(monkeypatch):
    model = tiny.model()
    tokens = []
    forward = model.base_model.forward
    monkeypatch.setattr(
        model.base_model,
        "forward",
        lambda input_ids, **kw: tokens.append(input_ids.numel()) or forward(input_ids, **kw),
    )
    RolloutEngine(model).generate(PROMPTS, 8, SamplingParams(max_tokens=3, seed=0))
    assert tokens == [sum(map(len, PROMPTS)), 8 * len(PROMPTS), 8 * len(PROMPTS)]


def test_finished_rows_leave(monkeypatch):
    model = tiny.model("llama")
    rows = []
    forward = model.base_model.forward
    monkeypatch.setattr(
        model.base_model, "forward", lambda input_ids, **kw: rows.append(input_ids.numel()) or forward(input_ids, **kw)
    )
    sampling = SamplingParams(temperature=1.5, max_tokens=60, stop_token_ids=tuple(range(1, 9)), seed=3)
    RolloutEngine(model).generate(PROMPTS, 16, sampling)
    assert rows[1] > 4 * rows[-1]


def test_model_attends_as_before_outside_of_the_engine():
    model = tiny.model()
    before = model.config._attn_implementation
    RolloutEngine(model).generate(PROMPTS, 1, SamplingParams(max_tokens=2))
    assert model.config._attn_implementation == before


def test_a_group_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="num_generations=8 does not fit into max_num_seqs=4"):
        RolloutEngine(tiny.model(), max_num_seqs=4).generate(PROMPTS, 8)


@pytest.mark.parametrize("prompts, match", [([[]], "prompt 0 has no tokens"), ([[5] * 250], "context of 256")])
def test_refused_prompts(prompts, match):
    with pytest.raises(ValueError, match=match):
        RolloutEngine(tiny.model()).generate(prompts, 1, SamplingParams(max_tokens=20))


@pytest.mark.parametrize(
    "name, value", [("temperature", -1), ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("min_p", 2), ("max_tokens", 0)]
)
def test_refused_sampling(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_head_gives_fp32_logits_of_a_bf16_model():
    model = tiny.model().bfloat16()
    states = torch.randn(5, 32, dtype=torch.bfloat16)
    logits = RolloutEngine(model)._logits(states)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, states.float() @ head(model)[0].float().T)


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
    tokens, logps = sample(logits.expand(count, -1), params, torch.Generator().manual_seed(11))
    seen = torch.bincount(tokens, minlength=12)
    assert seen[expected == 0].sum() == 0
    allowed = expected > 0
    chi_square = ((seen[allowed] - count * expected[allowed]) ** 2 / (count * expected[allowed])).sum()
    # 99.9% quantile of chi-square with at most 11 degrees of freedom is 31.3.
    assert chi_square < 31.3
    full = torch.log_softmax(logits / params.temperature, -1)
    torch.testing.assert_close(logps, full[tokens])


def test_top_p_keeps_the_likeliest_token_whatever_p():
    kept = filter_logps(torch.log(torch.tensor([[0.1, 0.6, 0.3]])), SamplingParams(top_p=1e-6))
    assert kept.isfinite().tolist() == [[False, True, False]]
