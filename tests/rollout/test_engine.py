"""Generation: greedy tokens against transformers' own generate, log-probs against a teacher-forced forward, draws."""

import dataclasses
from functools import cache
from itertools import product
from unittest import mock

import pytest
import tiny
import torch
from drawing import BACKENDS, PROMPTS, finish, ids_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fastgrpo.rollout import engine as engine_module
from fastgrpo.rollout import weights as weights_module
from fastgrpo.rollout.engine import Lanes, RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams, filter_logps, penalize

LONGEST = 14
POOL = [*PROMPTS, [18, 19, 20, 21, 22], [23] * 11]
# Requests: a prompt of the pool, and the limits of its completions.
REQUESTS = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, LONGEST), min_size=1, max_size=6)),
                    min_size=1, max_size=6)  # fmt: skip

model_of = cache(tiny.model)


@cache
def greedy(architecture, number, penalty):
    ids = torch.tensor([POOL[number]])
    how = {"do_sample": False, "max_new_tokens": LONGEST, "eos_token_id": None, "pad_token_id": 0}
    out = model_of(architecture).generate(ids, attention_mask=torch.ones_like(ids), repetition_penalty=penalty, **how)
    return out[0, ids.shape[1] :].tolist()


def cut(ids, limit, stops):
    """What is left of a completion with this limit and these stop tokens, and why it ends."""
    end = next((i + 1 for i, token in enumerate(ids[:limit]) if token in stops), None)
    return ids[: end or limit], "stop" if end else "length"


QUICK = [("sdpa", "qwen2"), ("sdpa", "qwen3"), ("products", "llama"), ("products", "mistral"), ("products", "smollm3"),
         ("hf", "qwen2")]  # fmt: skip
EVERY = product(BACKENDS, tiny.ARCHITECTURES)
PAIRS = [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in EVERY]


@pytest.mark.parametrize("backend, architecture", PAIRS, indirect=["backend"])
@settings(max_examples=4, phases=[Phase.generate])
@given(REQUESTS, st.integers(0, 12), st.sets(st.integers(0, 63), max_size=9), st.sampled_from([1.0, 1.3, 0.8]),
       st.sampled_from([1, LONGEST]))  # fmt: skip
def test_greedy_equals_generate(backend, architecture, requests, spare, stops, penalty, packed_from):
    sampling = SamplingParams(temperature=0, stop_token_ids=tuple(stops), repetition_penalty=penalty)
    sampling = dataclasses.replace(sampling, max_tokens=LONGEST)
    rollouts = backend(model_of(architecture), max_num_seqs=max(len(limits) for _, limits in requests) + spare)
    for i, (number, limits) in enumerate(requests):
        rollouts.add_request(POOL[number], len(limits), sampling, request_id=i, max_tokens=limits)
    with mock.patch.object(weights_module, "PACKED_FROM", packed_from):
        found = finish(rollouts)
    for i, (number, limits) in enumerate(requests):
        for rollout, limit in zip(found[i], limits, strict=True):
            assert (rollout.ids, rollout.finish_reason) == cut(greedy(architecture, number, penalty), limit, stops)


HOW = {
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    "penalized": {"temperature": 1.5, "repetition_penalty": 1.4, "min_p": 0.01},
}
HOW = {name: SamplingParams(max_tokens=LONGEST, seed=4, **how) for name, how in HOW.items()}


@cache
def drawn_alone(how, number, count, request_id):
    return RolloutEngine(model_of("qwen3")).generate([POOL[number]], count, HOW[how], request_ids=[request_id])


@pytest.mark.parametrize("how, attention", [("plain", "sdpa"), ("filtered", "products"), ("penalized", "products")])
@settings(max_examples=6, phases=[Phase.generate])  # to shrink what fails takes minutes
@given(REQUESTS, st.integers(0, 12), st.sets(st.integers(0, 63), max_size=9), st.data())
def test_draws_do_not_depend_on_the_batch(attention, how, requests, spare, stops, data):
    sampling = dataclasses.replace(HOW[how], stop_token_ids=tuple(stops))
    most, outputs = max(len(limits) for _, limits in requests) + spare, {}
    engine = RolloutEngine(model_of("qwen3"), max_num_seqs=most, attention=attention)
    engine.on_gpu = data.draw(st.booleans())  # decodes the next steps before it handles the last
    at_first, aborted = data.draw(st.integers(1, len(requests))), data.draw(st.sets(st.integers(0, 5), max_size=1))
    with mock.patch.object(engine_module, "PREFILL_TOKENS", data.draw(st.sampled_from([8, 16384]))):
        for i, (number, limits) in enumerate(requests):
            if i >= at_first:
                outputs |= engine.step()
            engine.add_request(POOL[number], len(limits), sampling, request_id=i, max_tokens=limits)
        outputs |= engine.step()
        for i in aborted - outputs.keys():
            engine.abort_request(i)
        outputs |= finish(engine)
    assert max(engine.live_lanes) <= most and engine.work_left() == 0
    for i, (number, limits) in enumerate(requests):
        assert i in outputs or i in aborted
        expected = drawn_alone(how, number, len(limits), i)
        for rollout, limit, alone in zip(outputs.get(i, ()), limits, expected, strict=i not in aborted):
            ids, reason = cut(alone.ids, limit, stops)
            assert (rollout.ids, rollout.finish_reason) == (ids, reason)
            torch.testing.assert_close(rollout.logps, alone.logps[: len(ids)], atol=1e-5, rtol=0)
            torch.testing.assert_close(rollout.sampler_logps, alone.sampler_logps[: len(ids)], atol=1e-4, rtol=0)


def test_the_gpu_decodes_while_the_host_handles_finished_completions():
    """A decode step takes 1 unit of time. The host queues steps at once, and handles what a step returns in 6 units."""
    engine, host, gpu, idle, snapshot = RolloutEngine(model_of("qwen3"), max_num_seqs=4), 0, 0, 0, 0
    engine.on_gpu = True
    decode, read, take = engine._decode, Lanes.read, Lanes.snapshot

    def decoding(n):
        nonlocal gpu, idle
        idle, gpu = idle + max(0, host - gpu), max(host, gpu) + 1
        decode(n)

    def snapshots(lanes):
        nonlocal snapshot
        snapshot = gpu
        take(lanes)

    def reading(lanes):
        nonlocal host
        host = max(host, snapshot)
        return read(lanes)

    with (
        mock.patch.object(engine, "_decode", decoding), mock.patch.object(Lanes, "read", reading),
        mock.patch.object(Lanes, "snapshot", snapshots),
    ):  # fmt: skip
        for i in range(4):
            engine.add_request(POOL[i], 1, SamplingParams(max_tokens=14 + 16 * i, seed=i), request_id=i)
        while engine.has_unfinished_requests():
            finished = engine.step()
            host += 6 * bool(finished)
    assert gpu >= 61 and idle == 0


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.9}, {"repetition_penalty": 1.5},
                {"repetition_penalty": 1.5, "top_k": 9, "top_p": 0.9}, {"repetition_penalty": 1.5, "temperature": 0.0}],
    ids=str,
)  # fmt: skip
def test_returns_log_probs_of_the_policy_and_of_the_filtered_sampler(backend, filters):
    rollouts = backend(model_of("llama"), max_num_seqs=7)
    rollouts.generate(PROMPTS, 3, SamplingParams(max_tokens=4, seed=1))  # lanes that kept no record of the filters
    sampling = SamplingParams(max_tokens=12, stop_token_ids=[1, 2, 3], seed=1, **{"temperature": 1.3, **filters})
    penalty, temperature = sampling.repetition_penalty, sampling.temperature or 1
    filters = {name: value for name, value in filters.items() if name not in ("repetition_penalty", "temperature")}
    for i, rollout in enumerate(rollouts.generate(PROMPTS, 3, sampling)):
        prompt, at = PROMPTS[i // 3], range(len(rollout.ids))
        with torch.no_grad():
            logits = model_of("llama")(torch.tensor([prompt + rollout.ids])).logits[0, len(prompt) - 1 : -1]
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for t in at:
            seen[t, prompt + rollout.ids[:t]] = True
        policy = (logits / temperature).log_softmax(-1)[at, rollout.ids]
        drawn_from = filter_logps(
            (penalize(logits, seen, penalty) / temperature).log_softmax(-1), **filters
        ).log_softmax(-1)
        assert rollout.logps.dtype == torch.float32
        torch.testing.assert_close(rollout.logps, policy, atol=1e-5, rtol=0)
        torch.testing.assert_close(rollout.sampler_logps, drawn_from[at, rollout.ids], atol=1e-4, rtol=0)
    if not filters:
        (rollout,) = rollouts.generate(PROMPTS[:1], 1, SamplingParams(temperature=0, max_tokens=4))
        assert rollout.sampler_logps is rollout.logps


def test_ignores_the_models_generation_settings(backend):
    plain, model = tiny.model(), tiny.model()
    own = {"repetition_penalty": 1.9, "typical_p": 0.3, "min_p": 0.2, "no_repeat_ngram_size": 1, "eos_token_id": 5}
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_tokens=12, seed=3)
        expected, seen = (backend(each).generate(PROMPTS, 2, sampling) for each in (plain, model))
        assert ids_of(seen) == ids_of(expected)
        assert all(torch.equal(a.logps, b.logps) for a, b in zip(seen, expected, strict=True))
    assert model.generation_config.repetition_penalty == 1.9


def test_a_seed_of_any_size_decides_and_without_one_torchs_global_one(backend):
    def drawn(seed):
        return ids_of(backend(model_of("qwen2")).generate(PROMPTS, 4, SamplingParams(max_tokens=12, seed=seed)))

    assert drawn(1) == drawn(1) != drawn(2)
    for seed in (-1, 2**64 + 5):
        assert drawn(seed) == drawn(seed % 2**64)
    torch.manual_seed(5)
    first, second = drawn(None), drawn(None)
    torch.manual_seed(5)
    assert drawn(None) == first != second


def test_auto_changes_the_layout_from_rollout_to_rollout(monkeypatch):
    monkeypatch.setattr("fastgrpo.rollout.attention.FEW_COPIES", 2 * sum(map(len, PROMPTS)))
    model, sampling = model_of("llama"), SamplingParams(max_tokens=20, seed=4)
    engine, layouts = RolloutEngine(model), []
    for group in (4, 1, 3, 4):
        fresh = RolloutEngine(model, attention="sdpa").generate(PROMPTS, group, sampling)
        assert ids_of(engine.generate(PROMPTS, group, sampling)) == ids_of(fresh)
        layouts.append(engine.geometry.flat)
    assert layouts == [False, True, True, False]
