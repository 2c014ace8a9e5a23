"""How many completions fit into what is free."""

import pytest
import tiny
import torch

from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.geometry import BUCKETS, Geometry, bucket, fit, kv_budget, kv_token_bytes, settled
from fastgrpo.rollout.sampling import SamplingParams

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


def test_not_even_one_group_fits():
    with pytest.raises(ValueError) as error:
        fit([(512, [4096] * 8)], 256, 12_288, 2**28, flat=False)
    assert str(error.value) == (
        "one group of 8 completions of up to 4096 tokens and its prompt of 512 needs 0.38 GiB for keys and values, and "
        "0.25 GiB are allowed: lower num_generations or max_completion_length, or raise rollout_memory_utilization"
    )


def test_bytes_of_a_token():
    """Qwen2.5-0.5B and Qwen3-0.6B in bf16, whose heads are wider than hidden / heads."""
    assert kv_token_bytes(tiny.config("qwen2", hidden_size=896, num_attention_heads=14, num_hidden_layers=24),
                          torch.bfloat16) == 12_288  # fmt: skip
    assert kv_token_bytes(tiny.config("qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8,
                                      num_hidden_layers=28, head_dim=128), torch.bfloat16) == 114_688  # fmt: skip


def test_the_budget_is_a_share_of_what_is_free():
    half, all_of_it = (kv_budget(torch.device("cpu"), share) for share in (0.5, 1.0))
    assert 0.3 < half / all_of_it < 0.7 and all_of_it > 2**28


def test_what_is_reserved_is_not_shared():
    cpu = torch.device("cpu")
    free = kv_budget(cpu, 1.0)
    assert 0 <= kv_budget(cpu, 1.0, free // 2) < 0.6 * free and kv_budget(cpu, 0.5, 2 * free) == 0


def test_a_geometry_that_is_there_stays_or_grows():
    def geometry(lanes, capacity, prompts=2, group=4):
        return Geometry(lanes, capacity, prompts, 16, group, True)

    requests = [(10, [8] * 4)]
    old = geometry(8, 16)
    assert settled(old, geometry(6, 8), requests, 1, 10**6) == old
    grown = settled(old, geometry(100, 8, 9, 1), requests, 1, 10**6)
    assert grown == geometry(100, 16, 9, 4) == settled(grown, old, requests, 1, 10**6)
    # A budget that holds 10 lanes of the shorter requests, and 8 of the longer ones before.
    assert settled(old, geometry(10, 8), requests, 1, old.tokens) == old
    assert settled(old, geometry(20, 8), requests, 1, old.tokens) == geometry(20, 8)
    assert settled(old, geometry(8, 17), [(10, [17] * 4)], 1, old.tokens) == geometry(8, 17)
    flat = Geometry(8, 16, 2, 16, 4, False)
    assert settled(old, flat, requests, 1, 10**6) == flat


def test_buckets_hold_the_lanes():
    geometry = Geometry(200, 5, 5, 64, 8, False)
    assert [bucket(n, geometry) for n in (1, 3, 17, 64, 65, 199, 200)] == [1, 4, 24, 64, 96, 200, 200]
    assert list(BUCKETS) == sorted(BUCKETS)


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
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [len(output.rollouts) for output in outputs] == [1, 20]


@pytest.mark.parametrize("share", [0, 1.5])
def test_refused_shares(share):
    with pytest.raises(ValueError, match="memory_utilization"):
        RolloutEngine(tiny.model(), memory_utilization=share)
