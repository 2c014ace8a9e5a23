"""Slots: how many fit into what is free, their order in memory, which lanes belong to which prompt, and moves."""

import dataclasses

import pytest
import tiny
import torch
from drawing import finish, ids_of
from hypothesis import given
from hypothesis import strategies as st

from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.slots import AMPLE, Geometry, Slots, fit, kv_token_bytes, memory_left, settled

CPU = torch.device("cpu")
ORDERS = pytest.mark.parametrize("memory_order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
REQUESTS = [(100, [50] * 4)] * 8


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


def test_prompts_with_one_completion_need_no_more_slots_than_lanes():
    assert fit([(100, [50])] * 1319, 256, 10, 2**30, flat=False) == Geometry(256, 50, 256, 112, 1, False)
    assert fit(REQUESTS, 12, 10, 2**30, flat=False) == Geometry(12, 50, 6, 112, 4, False)


@pytest.mark.parametrize("left, remedy", [(2**30, "raise rollout_memory_utilization"), (2**28, "reduce the memory")])
def test_a_group_that_does_not_fit_names_the_remedy(left, remedy):
    with pytest.raises(ValueError, match=f"num_generations .*or {remedy}"):
        fit([(512, [4096] * 8)], 256, 12_288, 2**28, flat=False, left=left)


def test_computes_kv_bytes_per_token():
    """Qwen2.5-0.5B and Qwen3-0.6B in bf16, whose heads are wider than hidden / heads."""
    assert kv_token_bytes(tiny.config("qwen2", hidden_size=896, num_attention_heads=14, num_hidden_layers=24),
                          torch.bfloat16) == 12_288  # fmt: skip
    assert kv_token_bytes(tiny.config("qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8,
                                      num_hidden_layers=28, head_dim=128), torch.bfloat16) == 114_688  # fmt: skip


def test_memory_left_excludes_reserved_memory():
    free = memory_left(CPU)
    assert free > 2**28 and 0 <= memory_left(CPU, free // 2) < 0.6 * free and memory_left(CPU, 2 * free) == 0


def geometry(lanes, capacity, prompts=2, group=4, flat=True):
    return Geometry(lanes, capacity, prompts, 16, group, flat)


def test_a_phase_keeps_its_geometry_or_grows():
    requests, old = [(10, [8] * 4)], geometry(8, 16)

    def after(new, requests=requests, budget=10**6):
        return settled({(4, True): old}, new, requests, 1, budget)

    assert after(geometry(6, 8)) == old
    assert after(geometry(100, 8, 9)) == geometry(100, 16, 9)
    # A budget that holds 10 lanes of the shorter requests, and 8 of the longer ones before.
    assert after(geometry(10, 8), budget=old.tokens) == old
    assert after(geometry(20, 8), budget=old.tokens) == geometry(20, 8)
    assert after(geometry(8, 17), [(10, [17] * 4)], old.tokens) == geometry(8, 17)
    shared = geometry(8, 16, flat=False)
    assert after(shared) == shared


@pytest.mark.parametrize("ample", [True, False])
def test_phases_share_a_geometry_only_where_memory_is_ample(ample):
    """And the smaller batches of a phase, such as refills of a step, do not make it go back and forth."""
    phases, training, evaluation = {}, geometry(64, 100, 16, 8, False), geometry(256, 100, 256, 1, False)
    both, refill = geometry(256, 100, 256, 8, False), geometry(8, 100, 1, 8, False)
    budget = int(both.tokens / AMPLE) + 1 if ample else both.tokens
    order = (training, evaluation, refill, training, evaluation)
    chosen = [settled(phases, new, [], 1, budget) for new in order]
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


def test_the_longest_prompt_and_the_largest_group_need_not_fit_together():
    model = tiny.model()
    engine = RolloutEngine(model, attention="products")
    engine.budget = Geometry(2, 5, 1, 192, 2, False).tokens * kv_token_bytes(model.config, model.dtype)
    engine.add_request([5] * 190, 1, SamplingParams(max_tokens=5, seed=0))
    engine.add_request([6] * 3, 20, SamplingParams(max_tokens=5, seed=0))
    assert [len(rollouts) for rollouts in finish(engine).values()] == [1, 20]


def make_slots(memory_order=(0, 1, 2), flat=False):
    """Seven lanes of 5 tokens, 4 prompts of 12, at most 3 lanes each; 2 key heads of 8 (values of 6) in one layer."""
    slots = Slots(Geometry(7, 5, 4, 12, 3, flat), CPU, memory_order)
    return slots, slots.cache(0, torch.empty(2, 1, 8), torch.empty(2, 1, 6, dtype=torch.bfloat16))


@ORDERS
@pytest.mark.parametrize("flat", [False, True])
def test_shapes_and_order_in_memory(memory_order, flat):
    slots, cache = make_slots(memory_order, flat)
    assert slots.cache(0, torch.empty(2, 1, 8), torch.empty(2, 1, 6)) is cache  # made once
    assert cache.keys.shape == (7, 2, 17 if flat else 5, 8) and cache.prompt_keys.shape == (0 if flat else 4, 2, 12, 8)
    assert cache.values.shape == (*cache.keys.shape[:3], 6) and cache.values.dtype == torch.bfloat16
    for tensor in cache:
        assert tensor.permute(*memory_order, 3).is_contiguous() and not tensor.any()


def test_shapes_that_a_graph_may_record():
    """Elsewhere the rows follow a bucket of the prompts in use, and the columns the group size of what is in flight."""
    slots = Slots(Geometry(512, 5, 300, 12, 8, False), torch.device("meta"))

    def shape(prompts, group):
        slots.arrange([prompt for prompt in range(prompts) for _ in range(group)], group)
        return tuple(slots.members.shape)

    assert [shape(n, 8) for n in (1, 4, 5, 17)] == [(4, 8), (4, 8), (16, 8), (64, 8)]
    assert shape(257, 1) == (300, 1) and shape(2, 1) == (4, 1)
    slots.arrange([2, -1, -1], 8)  # two completions of the group have finished
    assert tuple(slots.members.shape) == (4, 8)


@ORDERS
def test_lanes_move_with_their_keys(memory_order):
    slots, cache = make_slots(memory_order)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.arange(7)[:, None, None, None].expand_as(tensor))
    slots.move(torch.tensor([5, 6]), torch.tensor([2, 0]), 3)
    for tensor in (cache.keys, cache.values):
        assert (tensor[:, :, :3] == torch.tensor([6, 1, 5, 3, 4, 5, 6])[:, None, None, None]).all()
        assert (tensor[:, :, 3:] == torch.arange(7)[:, None, None, None]).all()  # tokens that no lane holds stay
