"""Completions with several turns: answers that arrive at any time change neither tokens nor log-probs."""

from functools import cache, partial

import pytest
import tiny
import torch
from dialogues import Scripted
from drawing import PROMPTS, finish, first_groups
from fake_vllm import FakeVLLM
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fastgrpo.data.records import Prompt, StopReason
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import Scoring, score
from fastgrpo.rollout import engine as engine_module
from fastgrpo.rollout.attention import GroupDecode
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.hf import HFBackend
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.vllm import VLLMBackend

LIMIT, STOPS = 30, tuple(range(0, 64, 5))
SEEDED = SamplingParams(max_tokens=LIMIT, stop_token_ids=STOPS, seed=3)
model_of = cache(tiny.model)


def rollouts_of(engine, scripts, sampling, monkeypatch):
    """Draw a group for each prompt with these scripts; returns samples in order. Time passes while the engine waits."""

    def tick(*_, **__):
        for group in scripts:
            for script in group:
                script.tick()

    monkeypatch.setattr(engine_module, "wait", tick)
    for i, group in enumerate(scripts):
        engine.add_request(PROMPTS[i], len(group), sampling, request_id=i, dialogues=group)
    return [sample for _, group in sorted(finish(engine).items()) for sample in group]


@pytest.fixture(scope="module")
def patched():
    with pytest.MonkeyPatch.context() as context:
        yield context


class Untrusted(GroupDecode):
    """The kernel's provider where its self-check fails: the plain parts take over."""

    def _trusted(self, query, cache, scale):
        return False


ANSWERS = st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=7), max_size=3)
GROUPS = st.lists(st.lists(st.tuples(ANSWERS, st.integers(0, 30)), min_size=1, max_size=4), min_size=1, max_size=4)
FILTERED = {"temperature": 1.5, "top_k": 9, "repetition_penalty": 1.3}


@pytest.mark.parametrize("attention, how", [("sdpa", FILTERED), ("products", {}), ("triton", FILTERED)])
@settings(max_examples=5, phases=[Phase.generate])  # to shrink what fails takes minutes
@given(groups=GROUPS, spare=st.integers(0, 12), on_gpu=st.booleans())
def test_neither_tokens_nor_log_probs_depend_on_when_answers_arrive(patched, attention, how, groups, spare, on_gpu):
    model, sampling = model_of("qwen3"), SamplingParams(max_tokens=LIMIT, stop_token_ids=STOPS, seed=7, **how)
    if attention == "triton":
        patched.setattr(engine_module, "make_provider", lambda *_: Untrusted())
    most = max(map(len, groups)) + spare
    found = []
    for delayed in (True, False):
        scripts = [[Scripted(answers, delay * delayed) for answers, delay in group] for group in groups]
        engine = RolloutEngine(model, max_num_seqs=most, attention="auto" if attention == "triton" else attention)
        engine.on_gpu = on_gpu  # decodes the next steps before it handles the last
        found.append(rollouts_of(engine, scripts, sampling, patched))
        assert max(engine.live_lanes) <= most and not engine.running
        for script, sample in zip((script for group in scripts for script in group), found[-1], strict=True):
            assert script.closed == [sample.finish_reason]
    patched.undo()
    forced = score(Policy.of(model), found[0], Scoring(sampling.temperature, 100))
    for sample, at_once, logps in zip(*found, forced, strict=True):
        assert (sample.ids, sample.tool_mask, sample.finish_reason) == (
            at_once.ids, at_once.tool_mask, at_once.finish_reason
        )  # fmt: skip
        torch.testing.assert_close(sample.logps, at_once.logps, atol=1e-5, rtol=0)
        torch.testing.assert_close(sample.logps, logps, atol=1e-5, rtol=0)
        torch.testing.assert_close(sample.sampler_logps, at_once.sampler_logps, atol=1e-5, rtol=0)


def test_answers_follow_their_turns_and_only_drawn_tokens_have_log_probs(monkeypatch, request):
    server = FakeVLLM()
    request.addfinalizer(server.stop)
    sampling = SamplingParams(temperature=0, max_tokens=LIMIT, stop_token_ids=STOPS)
    answers, found = [[[9, 8, 7], [3, 4]], [[12]], [], [[6] * 60]], []
    for make in (RolloutEngine, HFBackend, partial(VLLMBackend, base_urls=[server.url])):
        scripts = [[Scripted(given) for given in answers] for _ in PROMPTS]
        found.append(rollouts_of(make(model_of("llama")), scripts, sampling, monkeypatch))
        for sample, script in zip(found[-1], (script for group in scripts for script in group), strict=True):
            parts = []
            for number, turn in enumerate(script.turns):
                parts += [(1, token) for token in turn]
                if number < len(script.answers) and len(parts) < len(sample.ids):
                    parts += [(0, token) for token in script.answers[number]]
            known = [*zip(sample.tool_mask or [1] * len(sample.ids), sample.ids, strict=True)]
            assert known[: len(parts)] == parts and all(drawn for drawn, _ in known[len(parts) :])
            assert len(sample.logps) == len(sample.sampler_logps) == len(sample.drawn)
            assert script.closed == [sample.finish_reason]
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert (one.ids, one.tool_mask, one.finish_reason) == (other.ids, other.tool_mask, other.finish_reason)
            torch.testing.assert_close(one.logps, other.logps, atol=1e-5, rtol=0)
    assert {"stop", "length"} == {sample.finish_reason for sample in found[0]}
    assert any(sample.tool_mask for sample in found[0])


def test_while_tools_are_running_others_decode(monkeypatch):
    engine = RolloutEngine(model_of("llama"), max_num_seqs=2)
    scripts = [[Scripted([[1, 2]], delay=10**9)] for _ in range(2)] + [[Scripted([])] for _ in range(2)]
    for i, group in enumerate(scripts):
        engine.add_request(PROMPTS[i], 1, SEEDED, request_id=i, dialogues=group)
    monkeypatch.setattr(engine_module, "wait", lambda *_, **__: [s.tick(10**9) for group in scripts for s in group])
    finished = []
    while engine.has_unfinished_requests():
        finished += engine.step()
    assert sorted(finished[:2]) == [2, 3] and sorted(finished[2:]) == [0, 1]


def test_a_finished_group_does_not_wait_for_tools_of_others(monkeypatch):
    monkeypatch.setattr(engine_module, "wait", pytest.fail)
    for waits in (0, 1):  # the turn of either group may end first
        engine = RolloutEngine(model_of("llama"))
        for i in range(2):
            script = Scripted([[1]], delay=1) if i == waits else Scripted([])
            engine.add_request(PROMPTS[i], 1, SEEDED, request_id=i, dialogues=[script])
        while not (finished := engine.step()):
            pass
        assert list(finished) == [1 - waits]


def test_many_tokens_of_answers_are_appended_in_several_passes(monkeypatch):
    def drawn():
        scripts = [[Scripted([[1, 2, 3, 4]], delay=1) for _ in range(2)] for _ in PROMPTS]
        return rollouts_of(RolloutEngine(model_of("llama")), scripts, SEEDED, monkeypatch)

    at_once, passes, append = drawn(), [], RolloutEngine._append
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 9)
    noted = lambda engine, given: passes.append([*map(len, given.values())]) or append(engine, given)  # noqa: E731
    monkeypatch.setattr(RolloutEngine, "_append", noted)
    for sample, other in zip(drawn(), at_once, strict=True):
        assert (sample.ids, sample.tool_mask) == (other.ids, other.tool_mask)
    assert max(map(sum, passes)) == 8


def test_tokens_that_were_drawn_in_vain_are_counted_without_answers(monkeypatch):
    ended, waits, wanted = Scripted([]), Scripted([[1, 2, 3], [4]], delay=1), Scripted([[6]], delay=2)

    def tick(*_, **__):
        wanted.tick()
        if len(waits.turns) == 1:
            waits.tick()

    monkeypatch.setattr(engine_module, "wait", tick)
    groups = {
        0: [Prompt(PROMPTS[0], "", dialogue=ended), Prompt(PROMPTS[1], "", dialogue=waits)],
        1: [Prompt(PROMPTS[2], "", dialogue=wanted)],
    }
    done, lost = first_groups(RolloutEngine(model_of("llama")), groups, SEEDED, 1)
    assert list(done) == [1] and len(waits.turns) == 2
    assert ended.closed == [StopReason.STOP] and waits.closed == [StopReason.ABORTED]
    assert lost == sum(map(len, ended.turns + waits.turns))
