"""How many completions fit into what is free."""

import pytest
import tiny
import torch

from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.slots import (
    AMPLE,
    BUCKETS,
    PROMPT_BUCKETS,
    Geometry,
    bucket,
    copied_tokens,
    fit,
    kv_token_bytes,
    memory_left,
    settled,
)

REQUESTS = [(100, [50] * 4)] * 8


def test_all_fit_where_memory_is_plenty():
    assert fit(REQUESTS, 256, 10, 2**30, flat=False) == Geometry(32, 50, 8, 112, 4, False)
    assert fit(REQUESTS, 12, 10, 2**30, flat=False) == Geometry(12, 50, 6, 112, 4, False)


def test_fewer_lanes_where_it_is_not():
    shared = fit(REQUESTS, 256, 10, 20_000, flat=False)
    flat = fit(REQUESTS, 256, 10, 20_000, flat=True)
    assert 4 <= flat.lanes < shared.lanes < 32
    assert shared.tokens * 10 <= 20_000 and flat.tokens * 10 <= 20_000
    more = Geometry(shared.lanes + 1, 50, shared.prompts, 112, 4, False)
    assert more.tokens * 10 > 20_000


def test_prompts_with_one_completion_need_no_more_slots_than_lanes():
    assert fit([(100, [50])] * 1319, 256, 10, 2**30, flat=False) == Geometry(256, 50, 256, 112, 1, False)


@pytest.mark.parametrize(
    "left, remedy",
    [
        (2**30, "raise rollout_memory_utilization"),
        (2**28, "let the model and its training take less, which leave 0.25 GiB (docs/memory.md)"),
    ],
)
def test_not_even_one_group_fits(left, remedy):
    with pytest.raises(ValueError) as error:
        fit([(512, [4096] * 8)], 256, 12_288, 2**28, flat=False, left=left)
    assert str(error.value) == (
        "one group of 8 completions of up to 4096 tokens and its prompt of 512 needs 0.38 GiB for keys and values, and "
        f"0.25 GiB are allowed: lower num_generations or max_completion_length, or {remedy}"
    )


def test_bytes_of_a_token():
    """Qwen2.5-0.5B and Qwen3-0.6B in bf16, whose heads are wider than hidden / heads."""
    assert kv_token_bytes(tiny.config("qwen2", hidden_size=896, num_attention_heads=14, num_hidden_layers=24),
                          torch.bfloat16) == 12_288  # fmt: skip
    assert kv_token_bytes(tiny.config("qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8,
                                      num_hidden_layers=28, head_dim=128), torch.bfloat16) == 114_688  # fmt: skip


def test_what_is_reserved_is_not_left():
    cpu = torch.device("cpu")
    free = memory_left(cpu)
    assert free > 2**28 and 0 <= memory_left(cpu, free // 2) < 0.6 * free and memory_left(cpu, 2 * free) == 0


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


def test_phases_share_a_geometry_where_memory_is_ample():
    phases, training, evaluation = {}, geometry(64, 100, 16, 8, False), geometry(256, 100, 256, 1, False)
    both = geometry(256, 100, 256, 8, False)
    budget = int(both.tokens / AMPLE) + 1
    chosen = [settled(phases, new, [], 1, budget) for new in (training, evaluation, training, evaluation)]
    assert chosen == [training, both, both, both]


def test_an_evaluation_does_not_inflate_training_where_memory_is_scarce():
    """And the smaller batches of a phase, such as refills of a step, do not make it go back and forth."""
    phases, training, evaluation = {}, geometry(64, 100, 16, 8, False), geometry(256, 100, 256, 1, False)
    refill, budget = geometry(8, 100, 1, 8, False), geometry(256, 100, 256, 8, False).tokens
    chosen = [settled(phases, new, [], 1, budget) for new in (training, evaluation, refill, training, evaluation)]
    assert chosen == [training, evaluation, training, training, evaluation]


def test_the_engine_shrinks_after_an_evaluation():
    model, sampling = tiny.model(), SamplingParams(max_tokens=4, seed=0)
    engine = RolloutEngine(model, attention="products")
    engine.budget = Geometry(12, 4, 12, 16, 1, False).tokens * kv_token_bytes(model.config, model.dtype)
    sizes = []
    for prompts, group in ((2, 2), (12, 1), (2, 2)):
        engine.generate([[5, 6]] * prompts, group, sampling)
        sizes.append((engine.geometry.lanes, engine.geometry.prompts))
    assert sizes == [(4, 2), (12, 12), (4, 2)]


def test_tokens_that_flat_slots_copy():
    assert copied_tokens(REQUESTS, 256) == 8 * 3 * 100
    assert copied_tokens(REQUESTS, 8) == 2 * 3 * 100  # two groups are in flight together
    assert copied_tokens([(1000, [50])] * 20, 256) == 0
    assert copied_tokens([(10, [5]), (30, [5, 5])], 256) == 30


def test_buckets_hold_the_lanes():
    assert [bucket(n, 200) for n in (1, 3, 17, 64, 65, 199, 200)] == [1, 4, 24, 64, 96, 200, 200]
    assert [bucket(n, 12, PROMPT_BUCKETS) for n in (1, 5, 12)] == [4, 12, 12]
    assert list(BUCKETS) == sorted(BUCKETS) and list(PROMPT_BUCKETS) == sorted(PROMPT_BUCKETS)


def test_a_tight_budget_changes_nothing_but_the_order():
    model, prompts = tiny.model(), [[5, 6, 7], [8], [9, 10, 11, 12], [16, 17]] * 3
    sampling = SamplingParams(max_tokens=10, stop_token_ids=(1, 2, 3), seed=1)
    expected = RolloutEngine(model, attention="products").generate(prompts, 3, sampling)
    engine = RolloutEngine(model, attention="products")
    engine.budget = Geometry(6, 10, 4, 16, 3, False).tokens * kv_token_bytes(model.config, model.dtype)
    assert [r.ids for r in engine.generate(prompts, 3, sampling)] == [r.ids for r in expected]
    assert engine.geometry.lanes == 6
    engine = RolloutEngine(model, attention="products")
    engine.budget = 1000
    with pytest.raises(ValueError, match="one group of 3 completions of up to 10 tokens"):
        engine.generate(prompts, 3, sampling)
    assert not engine.has_unfinished_requests()


def test_the_longest_prompt_and_the_largest_group_need_not_fit_together():
    model = tiny.model()
    engine = RolloutEngine(model, attention="products")
    engine.budget = Geometry(2, 5, 1, 192, 2, False).tokens * kv_token_bytes(model.config, model.dtype)
    engine.add_request([5] * 190, 1, SamplingParams(max_tokens=5, seed=0))
    engine.add_request([6] * 3, 20, SamplingParams(max_tokens=5, seed=0))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= engine.step()
    assert [len(rollouts) for rollouts in outputs.values()] == [1, 20]


@pytest.mark.parametrize("share", [0, 1.5])
def test_refused_shares(share):
    with pytest.raises(ValueError, match="memory_utilization"):
        RolloutEngine(tiny.model(), memory_utilization=share)
