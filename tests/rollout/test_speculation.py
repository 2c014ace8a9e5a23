"""Speculative decoding draws what plain decoding draws: with filters, limits, stops, several groups and aborts."""

import copy

import pytest
import tiny
import torch
from drawing import PROMPTS

from fastgrpo.rollout import speculation
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.lanes import Lanes
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.speculation import Speculation, Verification

REPEATED = [[5, 6, 7, 5, 6, 7, 5, 6], [8, 8, 8], [9, 10, 11, 9, 10, 11, 12], [16, 17]]
LOGPS = {"atol": 1e-5, "rtol": 0}  # fp32 rounding of products of other shapes


@pytest.fixture(scope="module")
def model():
    """A model whose draws repeat themselves: scaled logits leave few tokens likely."""
    model = tiny.model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight *= 3
    return model


@pytest.fixture
def eager(monkeypatch):
    """Drafts whatever can be guessed, so that many drafts are accepted in part, and many not at all."""
    monkeypatch.setattr(speculation, "worth_verifying", lambda chances: [len(of_lane) for of_lane in chances])


def both(model, sampling, *, prompts=REPEATED, group=3, attention="products", lanes=256, k=4):
    """Draw without and with drafts; returns the rollouts of both, and the engine that drafted."""
    plain = RolloutEngine(model, max_num_seqs=lanes, attention=attention).generate(prompts, group, sampling)
    engine = RolloutEngine(model, max_num_seqs=lanes, attention=attention, num_speculative_tokens=k)
    return plain, engine.generate(prompts, group, sampling), engine


def assert_same(plain, drafted):
    for a, b in zip(plain, drafted, strict=True):
        assert (a.ids, a.finish_reason) == (b.ids, b.finish_reason)
        torch.testing.assert_close(a.logps, b.logps, **LOGPS)
        assert (a.kept is None) == (b.kept is None)
        if a.kept is not None:
            torch.testing.assert_close(a.kept, b.kept, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "products"])
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 4},
        {"temperature": 1.2, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.5, "repetition_penalty": 0.8, "top_k": 9},
        {"temperature": 0.6, "stop_token_ids": (1, 2, 3, 20, 33, 40, 50)},
        {"temperature": 0.6, "max_tokens": 2},
        {"temperature": 0.6, "max_tokens": 1},
    ],
    ids=str,
)
def test_the_same_draws(model, eager, attention, how):
    sampling = SamplingParams(**{"max_tokens": 30, "seed": 3} | how)
    plain, drafted, engine = both(model, sampling, attention=attention)
    assert_same(plain, drafted)
    if sampling.max_tokens > 2:  # the last token is no draft
        assert 0 < engine.speculation.accepted < engine.speculation.drafted
        assert engine.metrics()["rollout/tokens_per_step"] > 1


def test_lanes_are_refilled_and_moved_between_passes(model, eager):
    """Groups of several limits wait for lanes, and the last lanes move into gaps."""
    sampling = SamplingParams(temperature=0.6, max_tokens=30, seed=5, stop_token_ids=(20, 33))
    limits = [[30, 3, 11, 7], [2, 29, 30, 5], [9, 1, 30, 30], [4, 4, 4, 23]]
    outputs = []
    for k in (0, 5):
        engine = RolloutEngine(model, max_num_seqs=6, attention="products", num_speculative_tokens=k)
        for i, prompt in enumerate(REPEATED):
            engine.add_request(prompt, 4, sampling, request_id=i, max_tokens=limits[i])
        finished = {}
        while engine.has_unfinished_requests():
            work = engine.work_left()
            finished |= {output.request_id: output.rollouts for output in engine.step()}
            assert engine.work_left() < work
        outputs.append([rollout for i in range(4) for rollout in finished[i]])
    assert_same(*outputs)
    assert {rollout.finish_reason for rollout in outputs[0]} == {"stop", "length"}
    assert engine.speculation.accepted


def test_a_group_is_aborted_between_passes(model, eager):
    sampling = SamplingParams(temperature=0.4, max_tokens=40, seed=2)
    plain = RolloutEngine(model).generate(REPEATED[:2], 2, sampling)
    engine = RolloutEngine(model, num_speculative_tokens=4)
    for i, prompt in enumerate(REPEATED):
        engine.add_request(prompt, 2, sampling, request_id=i)
    for _ in range(4):
        engine.step()
    drawn = [engine.abort_request(i) for i in (2, 3)]
    assert all(10 <= count <= 2 * (1 + 5 * 4) for count in drawn) and sum(drawn) > 2 * 10  # 5 each without drafts
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output.rollouts for output in engine.step()}
    assert_same(plain, finished[0] + finished[1])


def test_two_runs_have_the_same_bits(model):
    """Also after another rollout, as in a run that was resumed: nothing is kept from one rollout to the next."""
    sampling = SamplingParams(temperature=0.3, max_tokens=40, seed=9)
    fresh, used = (RolloutEngine(model, num_speculative_tokens=4) for _ in range(2))
    used.generate(PROMPTS, 3, SamplingParams(temperature=0.9, max_tokens=30, seed=1))
    first, second = (engine.generate(REPEATED, 1, sampling) for engine in (fresh, used))
    assert all(a.ids == b.ids and torch.equal(a.logps, b.logps) for a, b in zip(first, second, strict=True))
    assert fresh.speculation.accepted == used.speculation.accepted > 0


def test_many_lanes_and_bad_odds_draft_nothing(model):
    _, _, engine = both(model, SamplingParams(temperature=0, max_tokens=12), group=5)
    assert engine.speculation.drafted == 0  # 20 lanes
    assert engine.metrics()["rollout/draft_acceptance_rate"] == 0
    assert engine.metrics()["rollout/tokens_per_step"] == 1
    flat = copy.deepcopy(model)
    with torch.no_grad():
        flat.get_output_embeddings().weight *= 0  # every token is equally likely
    _, _, engine = both(flat, SamplingParams(max_tokens=60, seed=0), prompts=REPEATED[:1], group=1)
    assert engine.speculation.drafted < 12
    assert "rollout/tokens_per_step" not in RolloutEngine(model).metrics()


def test_fewer_steps_are_taken(model):
    sampling = SamplingParams(temperature=0, max_tokens=60)
    plain, drafted, engine = both(model, sampling, prompts=REPEATED[:1], group=1, k=7)
    assert_same(plain, drafted)
    assert engine.steps < 45  # 59 without drafts
    drawn = engine.metrics()["rollout/tokens_per_step"] * engine.steps
    assert drawn == pytest.approx(59)  # the first one is the prefill's


def test_one_completion_after_another_is_one_rollout(model):
    """Odds and counts go on where a waiting prompt begins on an engine that nothing runs on."""
    engine = RolloutEngine(model, max_num_seqs=1, num_speculative_tokens=7)
    rollouts = engine.generate(REPEATED, 1, SamplingParams(temperature=0, max_tokens=60))
    drawn = sum(len(rollout.ids) for rollout in rollouts)
    assert drawn - len(REPEATED) == pytest.approx(engine.metrics()["rollout/tokens_per_step"] * engine.steps)
    assert engine.steps < 0.8 * drawn


def test_a_bf16_model(eager):
    """Rounding is coarse there and may turn a draw, so that only greedy tokens of a clear maximum are compared."""
    model = tiny.model("llama").bfloat16()
    with torch.no_grad():
        model.get_output_embeddings().weight *= 30
    plain, drafted, engine = both(model, SamplingParams(temperature=0, max_tokens=12), group=1)
    assert [rollout.ids for rollout in plain] == [rollout.ids for rollout in drafted] and engine.speculation.drafted


def test_counts_of_accepted_tokens():
    lanes = Lanes(4, 9, torch.device("cpu"))
    rows = Verification([[5, 6, 7], None, [], [8]], lanes)
    assert rows.live == [0, 2, 3]
    assert rows.owners.tolist() == [0, 0, 0, 0, 2, 3, 3] and rows.offsets.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert rows.ids.tolist() == [0, 5, 6, 7, 0, 0, 8]
    assert rows.accepted([5, 6, 9, 1, 4, 8, 3], ()) == ([3, 1, 2], [0, 1, 2, 4, 5, 6], 3)
    assert rows.accepted([9, 6, 7, 1, 4, 9, 3], ()) == ([1, 1, 1], [0, 4, 5], 0)
    assert rows.accepted([5, 6, 7, 1, 4, 9, 3], ()) == ([4, 1, 1], [0, 1, 2, 3, 4, 5], 3)
    assert rows.accepted([5, 6, 7, 1, 4, 8, 3], (6, 8)) == ([2, 1, 1], [0, 1, 4, 5], 3)  # a draft that stops it


def test_a_penalty_sees_the_drafts_before_each_row():
    lanes = Lanes(2, 9, torch.device("cpu"))
    lanes.keep_seen(10)
    lanes.seen[1, 2] = True
    seen = Verification([[5, 6], [7]], lanes).seen(lanes)
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[], [5], [5, 6], [2], [2, 7]]
    assert lanes.seen.sum() == 1


def test_bad_numbers():
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        RolloutEngine(tiny.model(), num_speculative_tokens=-1)
    assert Speculation(3).metrics(0) == {"rollout/draft_acceptance_rate": 0, "rollout/tokens_per_step": 1}
