"""Requests in flight: added, cancelled, refused; lanes, prompts and weights while they are."""

import gc
import random

import pytest
import tiny
import torch
from drawing import PROMPTS, finish, ids_of

from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams


def test_batches_have_random_numbers_of_their_own(backend):
    drawn = backend(tiny.model(), max_num_seqs=4).generate(PROMPTS[:1] * 2, 4, SamplingParams(max_tokens=5, seed=3))
    assert ids_of(drawn[:4]) != ids_of(drawn[4:])


def test_a_failure_queues_requests_again_and_an_update_leaves_no_state(backend, monkeypatch):
    model = tiny.model()
    rollouts, sampling = backend(model, max_num_seqs=4), SamplingParams(max_tokens=5, seed=3)
    expected = backend(model, max_num_seqs=4).generate(PROMPTS[:3], 2, sampling)
    for i, prompt in enumerate(PROMPTS[:3]):
        rollouts.add_request(prompt, 2, sampling, request_id=i)
    with monkeypatch.context() as patch:
        patch.setattr(type(model.base_model), "forward", lambda *a, **k: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError, match="full"):
            rollouts.step()
    outputs = finish(rollouts)
    seen = [ids for i in sorted(outputs) for ids in ids_of(outputs[i])]
    assert len(seen) == len(expected)
    if isinstance(rollouts, RolloutEngine):
        assert seen == ids_of(expected)
    greedy = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(1,))
    before = ids_of(rollouts.generate(PROMPTS, 2, greedy))
    tiny.stir(model)
    found, fresh = (ids_of(each.generate(PROMPTS, 2, greedy)) for each in (rollouts, backend(model)))
    assert found == fresh != before and model.config._attn_implementation != "fastgrpo"  # outside it attends as before


def test_reports_progress_as_shares_of_the_work(backend):
    rollouts, told = backend(tiny.model(), max_num_seqs=4), []
    rollouts.generate(PROMPTS, 2, SamplingParams(max_tokens=6, seed=3), told.append)
    assert rollouts.work_left() == 0
    assert len(told) > 1 and min(told) >= 0 and sum(told) == pytest.approx(1)
    if isinstance(rollouts, RolloutEngine):
        assert 0 < told[0] < 0.5 and len([share for share in told if share > 0]) > 5


@pytest.mark.parametrize("aborted", [False, True], ids=["finished", "aborted"])
@pytest.mark.parametrize("attention", ["sdpa", "products"])
def test_non_finite_logits_leave_no_state(attention, aborted):
    model, sampling = tiny.model(), SamplingParams(max_tokens=9, seed=3)
    engine = RolloutEngine(model, attention=attention)
    expected = engine.generate(PROMPTS, 2, sampling)
    weight = model.base_model.layers[0].self_attn.v_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    if aborted:  # nobody takes its completions
        number = engine.add_request(PROMPTS[1] * 2, 8, sampling)
        engine.step()
        assert engine.abort_request(number) == 16
    else:
        with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.v_proj\.weight are NaN"):
            engine.generate(PROMPTS, 2, sampling)
    with torch.no_grad():
        weight.copy_(good)
    for _ in range(2):
        again = engine.generate(PROMPTS, 2, sampling)
        assert all(torch.equal(a.logps, b.logps) for a, b in zip(again, expected, strict=True))


def test_the_share_of_lanes_in_use_is_of_the_whole_generation():
    engine = RolloutEngine(tiny.model(), max_num_seqs=4)
    engine.generate(PROMPTS, 2, SamplingParams(max_tokens=5, seed=0))
    assert len(engine.live_lanes) >= 8
    assert engine.metrics() == {"rollout/live_mean": 4.0, "rollout/live_share": 1.0}
    engine.generate(PROMPTS[:1], 2, SamplingParams(max_tokens=5, seed=0))
    assert engine.metrics() == {"rollout/live_mean": 2.0, "rollout/live_share": 1.0}


def test_a_group_may_be_larger_than_the_default_limit():
    assert len(RolloutEngine(tiny.model()).generate([[5, 6]], 1030, SamplingParams(max_tokens=2, seed=0))) == 1030


def test_moved_weights_invalidate_graphs(monkeypatch):
    model, forgotten = tiny.model(), []
    engine, sampling = RolloutEngine(model), SamplingParams(max_tokens=2, seed=0)
    engine.generate(PROMPTS, 2, sampling)
    monkeypatch.setattr(engine.graphs, "clear", lambda: forgotten.append(1))
    with torch.no_grad():
        model.base_model.norm.weight.mul_(1.5)  # an optimizer's step leaves them in their place
    engine.generate(PROMPTS, 2, sampling)
    assert not forgotten
    model.base_model.norm.weight.data = model.base_model.norm.weight.data.clone()
    engine.generate(PROMPTS, 2, sampling)
    assert forgotten


@pytest.mark.parametrize("change, named", [
    ({"request_id": -1}, "request_id"), ({"request_id": 2**64}, "request_id"), ({"request_id": "a"}, "request_id"),
    ({"n": 2.5}, "num_generations"), ({"n": 8}, "num_generations=8"), ({"n": 0}, "num_generations"),
    ({"max_tokens": [1, 2.5]}, "max_tokens"), ({"max_tokens": 3}, "max_tokens"),
    ({"max_tokens": [1, 2, 3]}, "max_tokens"), ({"max_tokens": [1, 0]}, "max_tokens"),
    *(({"prompt_ids": prompt}, ".*prompt 7") for prompt in ("abc", [1.5], [3, -1], [], [5] * 254)),
])  # fmt: skip
def test_rejected_requests_leave_no_state(backend, change, named):
    rollouts = backend(tiny.model(), max_num_seqs=4)
    request = {"prompt_ids": PROMPTS[0], "n": 2, "sampling": SamplingParams(max_tokens=3), "request_id": 7}
    with pytest.raises(ValueError, match=f"^{named}"):
        rollouts.add_request(**{**request, **change})
    assert not rollouts.has_unfinished_requests()
    assert rollouts.add_request(PROMPTS[0], sampling=request["sampling"]) == 0


def test_rejects_requests_that_cannot_be_in_flight_together(backend):
    rollouts, sampling = backend(tiny.model()), SamplingParams(max_tokens=5)
    rollouts.add_request(PROMPTS[0], 2, sampling, request_id=7)
    with pytest.raises(ValueError, match="request 7 is in flight"):
        rollouts.add_request(PROMPTS[0], 2, sampling, request_id=7)
    for other in ({"temperature": 0.5}, {"repetition_penalty": 1.2}, {"top_k": 3}, {"stop_token_ids": [1]}):
        with pytest.raises(ValueError, match="must have the same temperature"):
            rollouts.add_request(PROMPTS[1], 2, SamplingParams(max_tokens=5, **other))
    with pytest.raises(ValueError, match="idle"):
        rollouts.generate(PROMPTS)
    assert rollouts.add_request(PROMPTS[1], 2, sampling) == 8


def test_rejects_weight_updates_with_requests_in_flight():
    model = tiny.model()
    engine = RolloutEngine(model)
    engine.add_request(PROMPTS[0], 2, SamplingParams(max_tokens=5))
    engine.step()
    with torch.no_grad():
        model.base_model.norm.weight.mul_(1.5)
    with pytest.raises(ValueError, match="weights changed while requests were in flight"):
        engine.step()
    engine.abort_request(0)
    assert len(engine.generate(PROMPTS, 2, SamplingParams(max_tokens=5))) == 8


def test_a_prompt_is_computed_once_a_group_in_parts_where_it_is_long(monkeypatch):
    model = tiny.model()
    tokens, forward = [], model.base_model.forward
    counted = lambda input_ids, **kw: tokens.append(input_ids.numel()) or forward(input_ids, **kw)  # noqa: E731
    monkeypatch.setattr(model.base_model, "forward", counted)
    RolloutEngine(model).generate(PROMPTS, 8, SamplingParams(max_tokens=3, seed=0))
    assert tokens == [sum(map(len, PROMPTS)), 8 * len(PROMPTS), 8 * len(PROMPTS)]
    tokens.clear()
    monkeypatch.setattr("fastgrpo.rollout.engine.PREFILL_TOKENS", 8)
    RolloutEngine(model).generate(PROMPTS, 2, SamplingParams(max_tokens=8, seed=0))
    assert tokens[:3] == [4, 7, 2]


@pytest.mark.slow
def test_leaks_nothing_over_many_requests():
    """200 generations of random prompts, lengths, sizes and aborts; the later ones add no object and no tensor."""
    rng, engine, kept = random.Random(0), RolloutEngine(tiny.model("llama"), max_num_seqs=24), []
    for step in range(200):
        sampling = SamplingParams(temperature=1.3, max_tokens=40, stop_token_ids=tuple(range(1, 9)), seed=step)
        for i in range(rng.randint(1, 11)):
            prompt = [rng.randint(5, 59) for _ in range(rng.randint(1, 29))]
            limits = [rng.randint(1, 40) for _ in range(rng.randint(1, 8))]
            engine.add_request(prompt, len(limits), sampling, request_id=i, max_tokens=limits)
        while engine.has_unfinished_requests():
            engine.step()
            if engine.unfinished and rng.random() < 0.025:
                engine.abort_request(next(iter(engine.unfinished)))
        assert not engine._live()
        if step in (120, 199):
            engine.generate([[5] * 9], 2, SamplingParams(max_tokens=4, seed=0))  # the last step leaves equal tensors
            gc.collect()
            objects = gc.get_objects()
            kept.append((len(objects), sum(each.numel() for each in objects if isinstance(each, torch.Tensor))))
            del objects  # it keeps the tensors of the step alive
    (before, elements), (after, elements_after) = kept
    assert elements_after == elements and after < before + 100


def test_requests_that_arrive_one_by_one_draw_together():
    model = tiny.model()
    sampling = SamplingParams(max_tokens=9, seed=3, top_k=5, stop_token_ids=range(3, 64, 20))
    expected = [RolloutEngine(model).generate([p], 2, sampling, request_ids=[7]) for p in PROMPTS]
    engine = RolloutEngine(model, max_num_seqs=8, continuous=True)
    outputs, read, most = {}, {i: [([], []), ([], [])] for i in range(4)}, 0
    for step in range(20):
        if step < 4:
            assert engine.add_request(PROMPTS[step], 2, sampling, draw_key=7) == step
        outputs |= engine.step()
        most = max(most, len({running.group for running in engine.running if running}))
        for i, parts in engine.progress({i: max(len(ids) for ids, _ in read[i]) for i in read}).items():
            for (ids, logps), (more, further, reason) in zip(read[i], parts, strict=True):
                ids += more
                logps += further.tolist()
                assert reason is None or reason == ("stop" if ids[-1] in sampling.stop_token_ids else "length")
    assert most >= 3 and not engine.running
    for i, samples in outputs.items():
        assert ids_of(samples) == ids_of(expected[i])
        for sample, (ids, logps) in zip(samples, read[i], strict=True):
            assert ids == sample.ids[: len(ids)]
            longest = max(len(sample.ids) for sample in samples)
            assert len(ids) >= min(len(sample.ids), longest - 1) or longest < 3  # the first step draws two tokens
            torch.testing.assert_close(torch.tensor(logps), sample.sampler_logps[: len(ids)])
    slots = engine.slots
    with torch.no_grad():
        model.base_model.norm.weight.mul_(1.5)
    (again,) = engine.generate(PROMPTS[:1], 1, SamplingParams(temperature=0, max_tokens=9))
    (fresh,) = RolloutEngine(model).generate(PROMPTS[:1], 1, SamplingParams(temperature=0, max_tokens=9))
    assert again.ids == fresh.ids and engine.slots is slots


def test_lanes_come_back_after_a_long_request():
    engine = RolloutEngine(tiny.model(), max_num_seqs=8, continuous=True)
    tokens = 2 * 2 * 2 * 8 * 4  # bytes of a token's keys and values
    engine.budget = 2 * 200 * tokens
    engine.add_request([5] * 20, 1, SamplingParams(max_tokens=150))
    engine.step()
    assert engine.geometry.lanes < 8
    short = SamplingParams(max_tokens=4)
    for _ in range(8):
        engine.add_request([5, 6], 1, short)
    finish(engine)
    assert engine.geometry.lanes == 8
