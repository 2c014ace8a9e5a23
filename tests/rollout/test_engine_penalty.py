"""A repetition penalty in both backends: over prompt and completion, as transformers applies it."""

import dataclasses

import pytest
import tiny
import torch
from drawing import PROMPTS

from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams, filter_logps, penalize


def greedy_of_transformers(model, prompt, penalty, max_tokens):
    ids = torch.tensor([prompt])
    how = {"do_sample": False, "max_new_tokens": max_tokens, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), repetition_penalty=penalty, **how)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_greedy_equals_generate(backend, architecture, penalty):
    """Prompts of several lengths together: no padding is penalized. Two completions of a prompt share it."""
    model = tiny.model(architecture)
    rollouts = backend(model, max_num_seqs=4)
    sampling = SamplingParams(temperature=0, max_tokens=14, repetition_penalty=penalty)
    drawn = [rollout.ids for rollout in rollouts.generate(PROMPTS, 2, sampling)]
    plain = [
        rollout.ids for rollout in rollouts.generate(PROMPTS, 2, dataclasses.replace(sampling, repetition_penalty=1))
    ]
    expected = [greedy_of_transformers(model, prompt, penalty, 14) for prompt in PROMPTS]
    assert drawn == [ids for ids in expected for _ in range(2)]
    assert drawn != plain


@pytest.mark.parametrize("filters", [{}, {"top_k": 9, "top_p": 0.9}], ids=str)
def test_log_probs_are_the_policys_and_kept_leads_to_the_samplers(backend, filters):
    model, penalty, temperature = tiny.model("llama"), 1.5, 1.3
    rollouts = backend(model, max_num_seqs=5)
    rollouts.generate(PROMPTS, 3, SamplingParams(max_tokens=4, seed=1))  # lanes that kept no such record
    sampling = SamplingParams(
        temperature=temperature, max_tokens=12, stop_token_ids=[1, 2, 3], seed=1, repetition_penalty=penalty, **filters
    )
    for i, rollout in enumerate(rollouts.generate(PROMPTS, 3, sampling)):
        prompt, at = PROMPTS[i // 3], range(len(rollout.ids))
        with torch.no_grad():
            logits = model(torch.tensor([prompt + rollout.ids])).logits[0, len(prompt) - 1 : -1]
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for t in at:
            seen[t, prompt + rollout.ids[:t]] = True
        policy = torch.log_softmax(logits / temperature, -1)[at, rollout.ids]
        drawn_from = filter_logps(torch.log_softmax(penalize(logits, seen, penalty) / temperature, -1), **filters)
        sampler = drawn_from.log_softmax(-1)[at, rollout.ids]
        torch.testing.assert_close(rollout.logps, policy, atol=1e-5, rtol=0)
        torch.testing.assert_close(rollout.sampler_logps, sampler, atol=1e-4, rtol=0)


def test_a_run_without_a_penalty_notes_no_tokens():
    engine = RolloutEngine(tiny.model(), max_num_seqs=4)
    engine.generate(PROMPTS, 2, SamplingParams(max_tokens=4, seed=1))
    assert engine.lanes.seen is None
    engine.generate(PROMPTS, 2, SamplingParams(max_tokens=4, seed=1, repetition_penalty=1.2))
    assert engine.lanes.seen.shape == (engine.geometry.lanes, 64) and engine.lanes.seen.dtype == torch.bool
    assert engine.lanes.kept is not None


def test_its_memory_is_taken_from_that_of_keys_and_values():
    """Where there is just room for the lanes, the notes of a penalty cost some of them."""
    sampling, lanes = SamplingParams(max_tokens=8, seed=1), []
    for penalty in (1.0, 1.2):
        engine = RolloutEngine(tiny.model(), max_num_seqs=16)
        engine.left, engine.budget = 10**6, 80_000
        engine.generate(PROMPTS * 4, 1, dataclasses.replace(sampling, repetition_penalty=penalty))
        lanes.append(engine.geometry.lanes)
    assert lanes[1] < lanes[0] < 16


def test_the_draws_do_not_depend_on_the_batch():
    model, sampling = (
        tiny.model(),
        SamplingParams(max_tokens=16, stop_token_ids=(1, 2, 3), seed=4, repetition_penalty=1.4),
    )
    together = RolloutEngine(model).generate(PROMPTS, 3, sampling)
    few = RolloutEngine(model, max_num_seqs=3).generate(PROMPTS, 3, sampling)
    assert [rollout.ids for rollout in few] == [rollout.ids for rollout in together]


def test_requests_with_another_penalty_wait():
    engine = RolloutEngine(tiny.model())
    engine.add_request(PROMPTS[0], sampling=SamplingParams(max_tokens=4, repetition_penalty=1.2))
    with pytest.raises(ValueError, match="share temperature, filters, penalty and stop tokens"):
        engine.add_request(PROMPTS[1], sampling=SamplingParams(max_tokens=4))
