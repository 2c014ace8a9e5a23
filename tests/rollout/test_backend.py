"""Requests in flight: added, cancelled, refused; lanes, prompts and weights while they are."""

import pytest
import tiny
import torch
from drawing import PROMPTS, greedy_of_transformers

from fastgrpo.rollout import engine as engine_module
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.hf import HFBackend
from fastgrpo.rollout.sampling import SamplingParams


def test_requests_wait_again_after_a_failure(backend, monkeypatch):
    model = tiny.model()
    rollouts, sampling = backend(model, max_num_seqs=4), SamplingParams(max_tokens=5, seed=3)
    expected = backend(model, max_num_seqs=4).generate(PROMPTS[:3], 2, sampling)
    for i, prompt in enumerate(PROMPTS[:3]):
        rollouts.add_request(prompt, 2, sampling, request_id=i)
    with monkeypatch.context() as patch:
        patch.setattr(type(model.base_model), "forward", lambda *a, **k: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError, match="full"):
            rollouts.step()
    outputs = {}
    while rollouts.has_unfinished_requests():
        outputs |= rollouts.step()
    seen = [rollout.ids for i in sorted(outputs) for rollout in outputs[i]]
    assert len(seen) == len(expected)
    if isinstance(rollouts, RolloutEngine):
        assert seen == [rollout.ids for rollout in expected]


def test_progress_is_told_in_shares_of_the_work(backend):
    """Also while prompts wait and before the first completion has ended; what is told adds up to all of it."""
    rollouts, told = backend(tiny.model(), max_num_seqs=4), []
    rollouts.generate(PROMPTS, 2, SamplingParams(max_tokens=6, seed=3), told.append)
    assert rollouts.work_left() == 0
    assert len(told) > 1 and min(told) >= 0 and sum(told) == pytest.approx(1)
    if isinstance(rollouts, RolloutEngine):
        assert 0 < told[0] < 0.5 and len([share for share in told if share > 0]) > 5


@pytest.mark.parametrize("aborted", [False, True], ids=["finished", "aborted"])
@pytest.mark.parametrize("attention", ["sdpa", "products"])
def test_what_is_not_finite_leaves_nothing_behind(attention, aborted):
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
        assert not any(rollout.logps.isfinite().all() for rollout in engine.generate(PROMPTS, 2, sampling))
    with torch.no_grad():
        weight.copy_(good)
    for _ in range(2):
        again = engine.generate(PROMPTS, 2, sampling)
        assert all(torch.equal(a.logps, b.logps) for a, b in zip(again, expected, strict=True))
    assert not engine.lanes.spoilt


def test_training_and_evaluation_take_no_turns_at_keys_and_values():
    engine = RolloutEngine(tiny.model(), max_num_seqs=8)
    cleared = []
    clear, engine.graphs.clear = engine.graphs.clear, lambda: (cleared.append(1), clear())
    for _ in range(3):
        engine.generate(PROMPTS[:2], 4, SamplingParams(max_tokens=4, seed=0))
        engine.generate(PROMPTS * 2, 1, SamplingParams(max_tokens=9, seed=0))
    assert len(cleared) <= 3  # made, and grown once; the weights' places are new at the beginning


def test_what_was_live_is_of_the_whole_generation():
    """Also where all lanes empty at once while more wait."""
    engine = RolloutEngine(tiny.model(), max_num_seqs=4)
    engine.generate(PROMPTS, 2, SamplingParams(max_tokens=5, seed=0))
    looks = engine.live_lanes
    assert len(looks) >= 8 and set(looks) == {4}
    assert engine.metrics() == {"rollout/live_mean": 4.0, "rollout/live_share": 1.0}
    engine.generate(PROMPTS[:1], 2, SamplingParams(max_tokens=5, seed=0))
    assert set(engine.live_lanes) == {2}


def test_graphs_are_forgotten_when_weights_move_in_memory(monkeypatch):
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


@pytest.mark.parametrize("attention", ["sdpa", "products"])
def test_freed_lanes_take_the_next_group(monkeypatch, attention):
    model = tiny.model("llama")
    sampling = SamplingParams(temperature=1.5, max_tokens=30, stop_token_ids=tuple(range(1, 9)), seed=3)
    prompts = PROMPTS * 6
    expected = RolloutEngine(model, attention=attention).generate(prompts, 2, sampling)
    engine, seen = RolloutEngine(model, max_num_seqs=8, attention=attention), []
    start = engine._start
    monkeypatch.setattr(engine, "_start", lambda groups: seen.append(engine._live()) or start(groups))
    rollouts = engine.generate(prompts, 2, sampling)
    assert [rollout.ids for rollout in rollouts] == [rollout.ids for rollout in expected]
    assert len(seen) > 3 and any(0 < live < 8 for live in seen)  # started beside others that went on
    assert max(engine.live_lanes) <= 8
    for one, other in zip(rollouts, expected, strict=True):
        torch.testing.assert_close(one.logps, other.logps, atol=1e-5, rtol=0)


def test_groups_are_added_taken_and_cancelled_on_the_way(backend):
    model = tiny.model()
    sampling = SamplingParams(max_tokens=10, seed=2)
    expected = RolloutEngine(model).generate(PROMPTS, 2, sampling)
    rollouts = backend(model)
    first = rollouts.add_request(PROMPTS[0], 2, sampling)
    second = rollouts.add_request(PROMPTS[1], 2, sampling, max_tokens=[10, 4])
    outputs = rollouts.step()
    third = rollouts.add_request(PROMPTS[2], 2, sampling)
    rollouts.abort_request(first)
    rollouts.abort_request(first)
    while rollouts.has_unfinished_requests():
        outputs |= rollouts.step()
    assert set(outputs) - {first} == {second, third}
    assert [len(rollout.ids) for rollout in outputs[second]] == [10, 4]
    if not isinstance(rollouts, HFBackend):  # its draws depend on the batch
        assert first not in outputs
        assert outputs[second][1].ids == expected[3].ids[:4]
        assert [rollout.ids for rollout in outputs[third]] == [rollout.ids for rollout in expected[4:6]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_id": -1}, r"request_id must be from 0 to 2\^63 - 1, got -1"),
        ({"request_id": 2**64}, r"request_id must be from 0 to 2\^63 - 1"),
        ({"request_id": "a"}, "request_id must be an integer, got 'a'"),
        ({"n": 2.5}, "num_generations must be an integer, got 2.5"),
        ({"max_tokens": [1, 2.5]}, r"max_tokens must be a list of integers, got \[1, 2.5\]"),
        ({"max_tokens": 3}, "max_tokens must be a list of integers, got 3"),
        ({"prompt_ids": "abc"}, "the token ids of prompt 7 must be a list of integers, got 'abc'"),
        ({"prompt_ids": [1.5]}, r"the token ids of prompt 7 must be a list of integers, got \[1.5\]"),
        ({"prompt_ids": [3, -1]}, "prompt 7 has the token id -1, which is negative"),
    ],
)
def test_a_refused_request_leaves_nothing_behind(backend, change, message):
    rollouts = backend(tiny.model())
    given = {"prompt_ids": PROMPTS[0], "n": 2, "sampling": SamplingParams(max_tokens=3), "request_id": 7}
    with pytest.raises(ValueError, match=f"^{message}"):
        rollouts.add_request(**{**given, **change})
    assert not rollouts.has_unfinished_requests()
    assert rollouts.add_request(PROMPTS[0], sampling=given["sampling"]) == 0


def test_seeds_of_any_size(backend):
    model = tiny.model()
    for seed in (-1, 2**64 + 5):
        first, same = (
            backend(model).generate(PROMPTS, 2, SamplingParams(max_tokens=9, seed=s)) for s in (seed, seed % 2**64)
        )
        assert [rollout.ids for rollout in first] == [rollout.ids for rollout in same]


def test_requests_that_cannot_be_in_flight_together(backend):
    rollouts, sampling = backend(tiny.model()), SamplingParams(max_tokens=5)
    rollouts.add_request(PROMPTS[0], 2, sampling, request_id=7)
    with pytest.raises(ValueError, match="request 7 is in flight"):
        rollouts.add_request(PROMPTS[0], 2, sampling, request_id=7)
    with pytest.raises(ValueError, match="share temperature"):
        rollouts.add_request(PROMPTS[1], 2, SamplingParams(temperature=0.5, max_tokens=5))
    with pytest.raises(ValueError, match="idle"):
        rollouts.generate(PROMPTS)
    assert rollouts.add_request(PROMPTS[1], 2, sampling) == 8


def test_weights_may_not_change_under_requests_in_flight():
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


def count_tokens(model, monkeypatch):
    """The list to which each forward pass adds its tokens."""
    tokens, forward = [], model.base_model.forward
    monkeypatch.setattr(
        model.base_model,
        "forward",
        lambda input_ids, **kw: tokens.append(input_ids.numel()) or forward(input_ids, **kw),
    )
    return tokens


def test_long_prompts_are_prefilled_in_parts(monkeypatch):
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 8)
    model = tiny.model()
    sampling = SamplingParams(temperature=0, max_tokens=8)
    tokens = count_tokens(model, monkeypatch)
    rollouts = RolloutEngine(model).generate(PROMPTS, 2, sampling)
    assert tokens[:3] == [4, 7, 2]
    for prompt, rollout in zip(PROMPTS, rollouts[::2], strict=True):
        assert rollout.ids == greedy_of_transformers(model, prompt, 8, ())


def test_keys_and_values_stay_in_their_place_between_calls():
    engine = RolloutEngine(tiny.model())
    engine.generate(PROMPTS, 2, SamplingParams(max_tokens=5))
    first = engine.slots
    for prompts in (PROMPTS, PROMPTS[:2]):
        engine.generate(prompts, 2, SamplingParams(max_tokens=4))
        assert engine.slots is first
    engine.generate(PROMPTS, 3, SamplingParams(max_tokens=5))
    assert engine.slots is not first


def test_nothing_of_the_old_weights_survives_an_update(backend):
    model = tiny.model()
    engine = backend(model)
    sampling = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(1,))
    before = [rollout.ids for rollout in engine.generate(PROMPTS, 2, sampling)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    after = [rollout.ids for rollout in engine.generate(PROMPTS, 2, sampling)]
    assert after != before
    assert after == [rollout.ids for rollout in backend(model).generate(PROMPTS, 2, sampling)]


def test_a_prompt_is_computed_once_a_group(monkeypatch):
    model = tiny.model()
    tokens = count_tokens(model, monkeypatch)
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


def test_model_attends_as_before_outside_of_the_engine(backend):
    model = tiny.model()
    before = model.config._attn_implementation
    backend(model).generate(PROMPTS, 1, SamplingParams(max_tokens=2))
    assert model.config._attn_implementation == before


def test_a_group_that_does_not_fit_is_refused(backend):
    with pytest.raises(ValueError, match="num_generations=8 does not fit into max_num_seqs=4"):
        backend(tiny.model(), max_num_seqs=4).generate(PROMPTS, 8)


@pytest.mark.parametrize("prompts, match", [([[]], "prompt 0 has no tokens"), ([[5] * 250], "context of 256")])
def test_refused_prompts(backend, prompts, match):
    with pytest.raises(ValueError, match=match):
        backend(tiny.model()).generate(prompts, 1, SamplingParams(max_tokens=20))


@pytest.mark.slow
def test_a_soak_leaks_nothing_and_loses_no_sequence():
    """200 generations of random prompts, lengths, group sizes and aborts."""
    import psutil

    model, rng = tiny.model("llama"), torch.Generator().manual_seed(0)
    engine, resident = RolloutEngine(model, max_num_seqs=24), []

    def number(low, high):
        return int(torch.randint(low, high, (), generator=rng))

    for step in range(200):
        sampling = SamplingParams(temperature=1.3, max_tokens=40, stop_token_ids=tuple(range(1, 9)), seed=step)
        wanted = {}
        for i in range(number(1, 12)):
            n, prompt = number(1, 9), [number(5, 60) for _ in range(number(1, 30))]
            limits = [number(1, 41) for _ in range(n)]
            engine.add_request(prompt, n, sampling, request_id=i, max_tokens=limits)
            wanted[i] = limits
        while engine.has_unfinished_requests():
            for i, rollouts in engine.step().items():
                for rollout, limit in zip(rollouts, wanted.pop(i), strict=True):
                    assert 1 <= len(rollout.ids) <= limit and len(rollout.logps) == len(rollout.ids)
                    assert (rollout.finish_reason == "stop") == (rollout.ids[-1] in sampling.stop_token_ids)
                    assert rollout.finish_reason == "stop" or len(rollout.ids) == limit
            if wanted and number(0, 40) == 0:
                dropped = next(iter(wanted))
                engine.abort_request(dropped)
                del wanted[dropped]
        assert not wanted and not engine._live()
        resident.append(psutil.Process().memory_info().rss)
    assert max(resident[150:]) < 1.02 * max(resident[50:100])
