"""Providers: each that runs here against a plain softmax over prompt and completion; the choice; what is refused."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from fastgrpo.policy import device as placed
from fastgrpo.rollout import attention
from fastgrpo.rollout.attention import (
    DecodeAttention,
    Flat,
    GroupDecode,
    PrefillAttention,
    SharedPrefix,
    choose_provider,
    flash_attn,
    make_provider,
    products,
)
from fastgrpo.rollout.slots import Geometry, Slots

PROMPTS, GROUPS = [3, 9, 1], [2, 3, 1]  # lengths, and lanes of each
HEADS, WIDTH = 6, 8


def lay_out(provider, kv_heads, dtype=torch.float64):
    """Slots with prompts of random keys, whose lanes are not in order and one is free; the owners and keys of lanes."""
    geometry = Geometry(7, 5, 4, 12, 3, provider.flat)
    slots = Slots(geometry, torch.device("cpu"), provider.memory_order)
    owners = [1, 0, -1, 2, 1, 0, 1]
    lanes = [[i for i, owner in enumerate(owners) if owner == prompt] for prompt in range(3)]
    prompts = [3, 0, 2]  # slots of the prompts
    tokens = sum(PROMPTS)
    key, value = (torch.randn(kv_heads, tokens, WIDTH, dtype=dtype) for _ in range(2))
    query = torch.randn(HEADS, tokens, WIDTH, dtype=dtype)
    PrefillAttention(PROMPTS, "cpu", slots, prompts, lanes, 20).attend(0, query, key, value, 0.3)
    slots.prompt_lengths[torch.tensor(prompts)] = torch.tensor(PROMPTS, dtype=torch.int32)
    slots.arrange([-1 if owner < 0 else prompts[owner] for owner in owners], group=3)
    history = {
        lane: tuple(tensor.split(PROMPTS, 1)[owner] for tensor in (key, value))
        for lane, owner in enumerate(owners)
        if owner >= 0
    }
    return slots, owners, history


PROVIDERS = [Flat(True), Flat(False), SharedPrefix(products, (0, 1, 2)), SharedPrefix(products, (0, 2, 1))]


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_against_a_plain_softmax(provider, kv_heads, ragged):
    slots, owners, history = lay_out(provider, kv_heads)
    drawn = torch.tensor([1, 3, 1, 2, 1, 1, 4] if ragged else [1] * 7)
    for step in range(1, 5):
        at = torch.minimum(drawn, torch.tensor(step)) - 1  # a finished lane writes its last token again
        if provider.flat:
            at = at + torch.tensor([PROMPTS[owner] if owner >= 0 else 0 for owner in owners])
        query = torch.randn(HEADS, 7, WIDTH, dtype=torch.float64)
        key, value = (torch.randn(kv_heads, 7, WIDTH, dtype=torch.float64) for _ in range(2))
        out = DecodeAttention(slots, provider, at).attend(0, query, key, value, 0.3)
        assert out.shape == (7, HEADS, WIDTH) and out.isfinite().all()
        for lane, (keys, values) in history.items():
            if step > drawn[lane]:
                keys, values = keys[:, :-1], values[:, :-1]
            keys, values = torch.cat([keys, key[:, lane, None]], 1), torch.cat([values, value[:, lane, None]], 1)
            history[lane] = keys, values
            repeated = [tensor.repeat_interleave(HEADS // kv_heads, 0) for tensor in (keys, values)]
            scores = (query[:, lane, None] * repeated[0]).sum(-1) * 0.3
            expected = (scores.softmax(-1)[..., None] * repeated[1]).sum(1)
            torch.testing.assert_close(out[lane], expected)


def test_auto_takes_what_works_and_says_so_once(caplog):
    caplog.set_level(logging.INFO, logger="fastgrpo")
    attention._logged.clear()
    cpu = torch.device("cpu")
    assert make_provider("auto", cpu, torch.float32, 64, 10).flat
    assert not make_provider("auto", cpu, torch.float32, 64, 2000).flat
    make_provider("auto", cpu, torch.float32, 64, 10)
    assert [record.getMessage() for record in caplog.records] == [
        "rollout attention on cpu: sdpa",
        "rollout attention on cpu: products",
    ]


def test_the_order_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    there = {"triton", "flash_attn"}
    monkeypatch.setattr(attention, "find_spec", lambda name: name in there or None)
    monkeypatch.setattr(attention, "package_obstacle", lambda module: None if "flash_attn" in there else "needs it")
    cuda = torch.device("cuda")

    def chosen(dtype=torch.bfloat16, head_dim=64):
        provider = make_provider("auto", cuda, dtype, head_dim, 512)
        return getattr(provider, "part", type(provider)).__name__

    assert chosen() == "GroupDecode"
    there.discard("triton")
    assert chosen() == "flash_attn"
    assert chosen(torch.float32) == "Flat"
    assert chosen(head_dim=512) == chosen(head_dim=20) == "Flat"
    there.discard("flash_attn")
    assert chosen() == "Flat"


@pytest.mark.parametrize(
    "name, device, dtype, head_dim, match",
    [
        ("triton", "cpu", torch.float32, 64, "'triton' needs a CUDA device; the model is on cpu; use attention="),
        ("flash_attn", "cpu", torch.bfloat16, 64, "needs a CUDA device"),
        ("flash_attn", "cuda", torch.float32, 64, "takes bf16 and fp16; the model is torch.float32"),
        ("flash_attn", "cuda", torch.bfloat16, 512, "a multiple of 8 and at most 256; the model's have 512"),
        ("flash_attn", "cuda", torch.bfloat16, 64, "needs the package: pip install flash-attn --no-build-isolation"),
        ("flash", "cpu", torch.float32, 64, "attention must be one of auto, triton, .*, got 'flash'"),
    ],
)
def test_refused(monkeypatch, name, device, dtype, head_dim, match):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(placed, "find_spec", lambda name: None)
    placed.package_obstacle.cache_clear()
    with pytest.raises(ValueError, match=match):
        make_provider(name, torch.device(device), dtype, head_dim, 10)


def test_a_flash_attn_that_does_not_load_is_refused_or_passed_over(monkeypatch, tmp_path, caplog):
    """As one that was built for another version of torch. The reason is logged once."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "find_spec", lambda name: None)  # no triton
    placed.package_obstacle.cache_clear()
    case = torch.device("cuda"), torch.bfloat16, 64, 10
    with pytest.raises(ValueError, match=r"'flash_attn' needs .* does not load \(ImportError: undefined symbol"):
        choose_provider("flash_attn", *case)
    assert [choose_provider("auto", *case) for _ in range(2)] == ["sdpa"] * 2
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "flash_attn is installed but does not load"
    ]
    placed.package_obstacle.cache_clear()


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
    test_against_a_plain_softmax(SharedPrefix(flash_attn, (0, 2, 1)), 3, True)


def test_the_kernel_is_given_the_prompts_in_use(monkeypatch):
    """It splits the keys of few prompts and not those of many, so stale slots would cost it its programs."""
    from fastgrpo.kernels import decode

    provider, shapes = GroupDecode(), []

    def recorded(query, keys, values, lengths, prompt_keys, prompt_values, prompt_lengths, members, *, scale):
        assert members.is_contiguous() and len(prompt_keys) == len(prompt_values) == len(prompt_lengths)
        shapes.append((len(prompt_keys), *members.shape))
        return query

    monkeypatch.setattr(decode, "group_decode", recorded)
    slots = Slots(Geometry(512, 5, 512, 12, 8, False), torch.device("cpu"), provider.memory_order)
    for prompts, group in ((3, 2), (300, 1), (1, 8)):
        lanes = [prompt for prompt in range(prompts) for _ in range(group)]
        slots.arrange(lanes, group)
        tokens = [torch.randn(heads, len(lanes), WIDTH) for heads in (HEADS, 2, 2)]
        DecodeAttention(slots, provider, torch.zeros(len(lanes), dtype=torch.int64)).attend(0, *tokens, 0.3)
    assert shapes == [(3, 3, 2), (300, 300, 1), (1, 1, 8)]
