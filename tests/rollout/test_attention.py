"""Decode attention: each provider that runs here against a plain softmax over prompt and completion; the choice."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgrpo.rollout import attention
from fastgrpo.rollout.attention import DecodeAttention, Flat, PrefillAttention, SharedPrefix, make_provider, products
from fastgrpo.rollout.slots import Geometry, Slots

HEADS, WIDTH, SCALE, CPU = 6, 8, 0.3, torch.device("cpu")
PROVIDERS = [Flat(True), Flat(False), SharedPrefix(products, (0, 1, 2)), SharedPrefix(products, (0, 2, 1))]


def randn(heads, tokens):
    return torch.randn(heads, tokens, WIDTH, dtype=torch.float64)


def prefill(provider, kv_heads, prompts, owners):
    """Prefill prompts of these lengths for lanes with these owners (-1 for a free one); returns the keys of lanes."""
    most = max(map(owners.count, range(len(prompts))))
    slots = Slots(Geometry(len(owners), 5, len(prompts) + 1, 12, most, provider.flat), CPU, provider.memory_order)
    places = [len(prompts) - i for i in range(len(prompts))]
    lanes = [[i for i, owner in enumerate(owners) if owner == prompt] for prompt in range(len(prompts))]
    query, key, value = (randn(heads, sum(prompts)) for heads in (HEADS, kv_heads, kv_heads))
    for tensor in slots.cache(0, key, value):
        tensor.fill_(50)  # as earlier completions have left there
    PrefillAttention(prompts, "cpu", slots, places, lanes, 20).attend(0, query, key, value, SCALE)
    slots.prompt_lengths[torch.tensor(places)] = torch.tensor(prompts, dtype=torch.int32)
    slots.arrange([-1 if owner < 0 else places[owner] for owner in owners], group=most)
    by_prompt = list(zip(key.split(prompts, 1), value.split(prompts, 1), strict=True))
    return slots, {lane: by_prompt[owner] for lane, owner in enumerate(owners) if owner >= 0}


def check_decode(provider, kv_heads, prompts, owners, drawn):
    """Four steps, of which each lane takes part in as many as it draws tokens; then it writes its last one again."""
    slots, history = prefill(provider, kv_heads, prompts, owners)
    for step in range(1, 5):
        at = torch.tensor(drawn).clamp(max=step) - 1
        if provider.flat:
            at += torch.tensor([prompts[owner] if owner >= 0 else 0 for owner in owners])
        query, key, value = (randn(heads, len(owners)) for heads in (HEADS, kv_heads, kv_heads))
        out = DecodeAttention(slots, provider, at).attend(0, query, key, value, SCALE)
        assert out.shape == (len(owners), HEADS, WIDTH) and out.isfinite().all()
        for lane, (keys, values) in history.items():
            if step > drawn[lane]:
                keys, values = keys[:, :-1], values[:, :-1]
            keys, values = torch.cat([keys, key[:, lane, None]], 1), torch.cat([values, value[:, lane, None]], 1)
            history[lane] = keys, values
            keys, values = (tensor.repeat_interleave(HEADS // kv_heads, 0) for tensor in (keys, values))
            scores = (query[:, lane, None] * keys).sum(-1) * SCALE
            torch.testing.assert_close(out[lane], (scores.softmax(-1)[..., None] * values).sum(1))


@st.composite
def layouts(draw):
    """Lengths of prompts, the owner of each lane, and how many tokens each lane draws."""
    prompts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    more = draw(st.lists(st.integers(-1, len(prompts) - 1), max_size=5))
    owners = draw(st.permutations([*range(len(prompts)), *more]))
    return prompts, owners, draw(st.lists(st.integers(1, 4), min_size=len(owners), max_size=len(owners)))


@pytest.mark.parametrize("provider", PROVIDERS, ids=["sdpa-cpu", "sdpa", "products", "products-tokens-first"])
@settings(max_examples=25)
@given(st.sampled_from([6, 3, 1]), layouts(), st.sampled_from([0, attention.MANY]))
def test_every_provider_equals_a_plain_softmax(provider, kv_heads, layout, many):
    with mock.patch.object(attention, "MANY", many):
        check_decode(provider, kv_heads, *layout)


def test_products_of_16_bits_have_an_fp32_softmax():
    query, (keys, values) = torch.randn(3, 2, 6, 8, dtype=torch.float64), torch.randn(2, 3, 3, 9, 8).double()
    lengths = torch.tensor([3, 9, 1], dtype=torch.int32)
    exact, exact_lse = products(query, keys, values, lengths, SCALE)
    out, lse = products(*(tensor.bfloat16() for tensor in (query, keys, values)), lengths, SCALE)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, atol=0.03, rtol=0.03)
    torch.testing.assert_close(lse.double(), exact_lse, atol=0.03, rtol=0.03)


def test_prefers_the_fastest_provider_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    there = {"triton", "flash_attn"}
    monkeypatch.setattr(attention, "find_spec", lambda name: name in there or None)
    monkeypatch.setattr(attention, "package_obstacle", lambda module: None if "flash_attn" in there else "needs it")

    def chosen(dtype=torch.bfloat16, head_dim=64):
        provider = make_provider("auto", torch.device("cuda"), dtype, head_dim, 512)
        return getattr(provider, "part", type(provider)).__name__

    assert chosen() == "GroupDecode"
    there.discard("triton")
    assert chosen() == "flash_attn"
    assert chosen(torch.float32) == chosen(head_dim=512) == chosen(head_dim=20) == "Flat"
    there.discard("flash_attn")
    assert chosen() == "Flat"


@pytest.mark.parametrize("name, device, dtype, head_dim", [
    ("triton", "cpu", torch.float32, 64), ("flash_attn", "cuda", torch.float32, 64),
    ("flash_attn", "cuda", torch.bfloat16, 64), ("flash", "cpu", torch.float32, 64),
])  # fmt: skip
def test_rejects_a_provider_that_does_not_work_here(monkeypatch, name, device, dtype, head_dim):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match="attention"):
        make_provider(name, torch.device(device), dtype, head_dim, 10)


def test_flash_attn_is_called_as_its_signature_says(monkeypatch):
    """flash-attn 2.7's `flash_attn_with_kvcache(q [S, Q, H, d], k_cache [S, L, K, d], v_cache, ..., cache_seqlens)`."""

    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
                                cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None,
                                softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                                return_softmax_lse=False):  # fmt: skip
        assert k_cache.is_contiguous() and not causal and return_softmax_lse
        return products(q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), cache_seqlens, softmax_scale)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache))
    owners, drawn = [1, 0, -1, 2, 1, 0, 1], [1, 3, 1, 2, 1, 1, 4]
    check_decode(SharedPrefix(attention.flash_attn, (0, 2, 1)), 3, [3, 9, 1], owners, drawn)
