"""Slots: how many fit into what is free, and what stays from phase to phase."""

import dataclasses
import weakref

import pytest
import tiny
import torch
from drawing import finish, ids_of
from hypothesis import given
from hypothesis import strategies as st

from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.slots import AMPLE, MARGIN, Geometry, fit, growing, kv_token_bytes, memory_left, settled

CPU = torch.device("cpu")


@given(
    st.lists(st.tuples(st.integers(1, 200), st.lists(st.integers(1, 90), min_size=1, max_size=9)), min_size=1,
             max_size=20), st.integers(9, 64), st.integers(1, 30_000), st.booleans(),
)  # fmt: skip
def test_as_many_lanes_as_requests_limits_and_memory_allow(requests, max_num_seqs, budget, flat):
    completions, group = sum(len(limits) for _, limits in requests), max(len(limits) for _, limits in requests)
    try:
        geometry = fit(requests, max_num_seqs, 1, budget, flat)
    except ValueError:
        assert fit(requests, group, 1, 10**9, flat).tokens > budget  # not even one group fits
        return
    assert group <= geometry.lanes <= min(max_num_seqs, completions) and geometry.tokens <= budget
    assert all(geometry.holds(length, limits) for length, limits in requests)
    if geometry.lanes < min(max_num_seqs, completions):
        assert fit(requests, geometry.lanes + 1, 1, 10**9, flat).tokens > budget


@given(st.integers(1, 9), st.integers(1, 40), st.integers(2, 90), st.integers(1, 30_000), st.floats(1, 90),
       st.integers(2, 64))  # fmt: skip
def test_as_many_lanes_grow_as_pages_for_their_mean_length_allow(group, prompts, capacity, budget, held, page):
    requests, most = [(16, [capacity] * group)] * prompts, 1 + prompts * group // 2
    try:
        new = fit(requests, max(most, group), 1, budget, flat=False)
    except ValueError:
        return
    rest = requests, most, 1, budget, held, page
    grown, full = growing(new, new.lanes, None, *rest), -(-capacity // page)
    each = min(full, MARGIN * held / page + 2)
    assert growing(new, most, None, *rest) == new  # they fit at full length, where `settled` chose fewer
    if not grown.pages:
        assert grown == new
        return
    least = grown.prompts * 16 + grown.pages * page
    assert full > 1 and growing(new, new.lanes, grown, *rest[:3], least - 1, *rest[4:]) != grown
    assert new.lanes < grown.lanes <= most and least <= budget
    assert grown.pages >= max(group * full + grown.lanes - group, grown.lanes * (each - 1))
    assert growing(new, new.lanes, grown, requests, most, 1, budget, held * 1.01, page) == grown  # a small change


def test_a_1_5b_model_gets_all_lanes_for_8k_tokens_if_a_quarter_is_used():
    requests, budget = [(512, [8192] * 8)] * 32, 34 * 2**30
    new = fit(requests, 256, 28_672, budget, flat=False)
    grown = growing(new, new.lanes, None, requests, 256, 28_672, budget, 2048, 2**21)
    assert new.lanes == 153 and (grown.lanes, grown.prompts, grown.capacity) == (256, 32, 8192)
    assert growing(new, new.lanes, None, requests, 256, 28_672, budget, 8192, 2**21) == new
    assert growing(new, new.lanes, None, requests, 256, 28_672, budget, 2048, 2**14) == new  # no page holds a token


@pytest.mark.parametrize("left, remedy", [(2**30, "raise rollout_memory_utilization"), (2**28, "reduce the memory")])
def test_a_group_that_does_not_fit_names_the_remedy(left, remedy):
    with pytest.raises(ValueError, match=f"num_generations .*or {remedy}"):
        fit([(512, [4096] * 8)], 256, 12_288, 2**28, flat=False, left=left)


def test_computes_kv_bytes_per_token():
    assert kv_token_bytes(tiny.config("qwen2", hidden_size=896, num_attention_heads=14, num_hidden_layers=24),
                          torch.bfloat16) == 12_288  # fmt: skip
    assert kv_token_bytes(tiny.config("qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8,
                                      num_hidden_layers=28, head_dim=128), torch.bfloat16) == 114_688  # fmt: skip


def test_memory_left_excludes_reserved_memory():
    free = memory_left(CPU)
    assert free > 2**28 and 0 <= memory_left(CPU, free // 2) < 0.6 * free and memory_left(CPU, 2 * free) == 0


@pytest.mark.parametrize("ample", [True, False])
def test_phases_share_a_geometry_only_where_memory_is_ample(ample):
    phases, training, evaluation = {}, Geometry(64, 100, 16, 16, 8, False), Geometry(256, 100, 256, 16, 1, False)
    both, refill = Geometry(256, 100, 256, 16, 8, False), Geometry(8, 100, 1, 16, 8, False)
    for on_gpu, sizes in ((False, 60), (True, 13)):  # a decode step has few sizes
        assert len({both.decoded(n, on_gpu) for n in range(1, both.lanes + 1)}) == sizes
    budget = int(both.tokens / AMPLE) + 1 if ample else both.tokens
    chosen = [settled(phases, new, [], 1, budget) for new in (training, evaluation, refill, training, evaluation)]
    assert chosen == ([training] + [both] * 4 if ample else [training, evaluation, training, training, evaluation])


def test_a_tight_budget_changes_nothing_but_the_order():
    model, prompts = tiny.model(), [[5, 6, 7], [8], [9, 10, 11, 12], [16, 17]] * 3
    sampling = SamplingParams(max_tokens=10, stop_token_ids=(1, 2, 3), seed=1)
    expected = RolloutEngine(model, attention="products").generate(prompts, 3, sampling)
    engine = RolloutEngine(model, attention="products")
    engine.budget = Geometry(6, 10, 4, 16, 3, False).tokens * kv_token_bytes(model.config, model.dtype)
    assert ids_of(engine.generate(prompts, 3, sampling)) == ids_of(expected)
    assert engine.geometry.lanes == 6
    penalized = RolloutEngine(model, attention="products")
    penalized.budget = engine.budget
    penalized.generate(prompts, 3, dataclasses.replace(sampling, repetition_penalty=1.2))
    assert penalized.geometry.lanes < 6  # a penalty notes the tokens of each lane
    gone = weakref.ref(penalized)
    del penalized
    assert gone() is None  # at once, without the garbage collector


def test_the_longest_prompt_and_the_largest_group_need_not_fit_together():
    model = tiny.model()
    engine = RolloutEngine(model, attention="products")
    engine.budget = Geometry(2, 5, 1, 192, 2, False).tokens * kv_token_bytes(model.config, model.dtype)
    engine.add_request([5] * 190, 1, SamplingParams(max_tokens=5, seed=0))
    engine.add_request([6] * 3, 20, SamplingParams(max_tokens=5, seed=0))
    assert [len(rollouts) for rollouts in finish(engine).values()] == [1, 20]
