"""Contexts: where prefill and decode store keys and values, and what the provider is told."""

import pytest
import torch

from fastgrpo.policy.attention import PackedAttention
from fastgrpo.rollout.attention import DecodeAttention, PrefillAttention, Provider
from fastgrpo.rollout.slots import Geometry, Slots

CPU = torch.device("cpu")
LENGTHS, PROMPTS, LANES = [3, 1, 4], [2, 0, 3], [[0, 5], [1], [3, 2, 4]]


class Recorder(Provider):
    """Keeps its arguments; the output is the query."""

    flat, memory_order = False, (0, 1, 2)

    def begin(self, slots, token_index, bounds):
        self.bounds = bounds

    def attend(self, query, cache, scale):
        self.scale = scale
        return query


def prefilled(flat):
    slots = Slots(Geometry(7, 5, 4, 6, 3, flat), CPU)
    tokens = [torch.randn(heads, 8, 4) for heads in (4, 2, 2)]
    context = PrefillAttention(LENGTHS, CPU, slots, PROMPTS, LANES, 20)
    out = context.attend(1, *tokens, 0.3)
    return slots, tokens, context, out


def test_prefill_stores_each_prompt_in_its_slot():
    slots, (query, key, value), context, out = prefilled(flat=False)
    cache = slots.caches[1]
    for prompt, length, keys, values in zip(
        PROMPTS, LENGTHS, key.split(LENGTHS, 1), value.split(LENGTHS, 1), strict=True
    ):
        assert (
            torch.equal(cache.prompt_keys[prompt, :, :length], keys) and not cache.prompt_keys[prompt, :, length:].any()
        )
        assert torch.equal(cache.prompt_values[prompt, :, :length], values)
    assert not cache.prompt_keys[1].any() and not cache.keys.any()
    assert context.longest == 20  # of lanes that go on, not of the prompts
    assert torch.equal(out, PackedAttention(LENGTHS, CPU).attend(1, query, key, value, 0.3))


def test_prefill_stores_each_prompt_in_the_flat_slots_of_its_lanes():
    slots, (_, key, value), *_ = prefilled(flat=True)
    cache = slots.caches[1]
    for lanes, length, keys, values in zip(LANES, LENGTHS, key.split(LENGTHS, 1), value.split(LENGTHS, 1), strict=True):
        for lane in lanes:
            assert torch.equal(cache.keys[lane, :, :length], keys) and not cache.keys[lane, :, length:].any()
            assert torch.equal(cache.values[lane, :, :length], values)
    assert not cache.keys[6].any()


@pytest.mark.parametrize("index", [[2, 2, 2], [0, 4, 1]])
def test_decode_stores_the_new_token_of_each_lane(index):
    slots = Slots(Geometry(7, 5, 4, 6, 3, False), CPU)
    provider = Recorder()
    query, key, value = (torch.randn(heads, 3, 4) for heads in (4, 2, 2))
    out = DecodeAttention(slots, provider, torch.tensor(index)).attend(0, query, key, value, 0.3)
    cache = slots.caches[0]
    for lane, token in enumerate(index):
        assert torch.equal(cache.keys[lane, :, token], key[:, lane])
        assert torch.equal(cache.values[lane, :, token], value[:, lane])
    assert cache.keys.count_nonzero() == key.numel()  # and nothing else
    assert torch.equal(out, query.transpose(0, 1))
    assert provider.bounds == (min(index), max(index)) and provider.scale == 0.3
