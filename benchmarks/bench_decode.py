"""The rollout's kernels: decode attention with a shared prompt against SDPA, and sampling against plain PyTorch.

Shapes: R lanes, H query heads, K key heads, d depth, T prompt tokens, C suffix tokens, V vocabulary. Attention is one
layer of one decode step of 16 groups of 16 at Qwen2.5's heads, bf16: ours with the prompt shared; ours with each lane
reading a prompt of its own; SDPA likewise. What ours is held to is reported in `extra_info["bars"]` and never asserted.

    pytest benchmarks/bench_decode.py --benchmark-only
    FASTGRPO_BENCH_SMALL=1: tiny shapes and two rounds, to see that it runs; nothing is written to results/. So it is
    without a GPU, and the Triton kernels are named as missing there.
"""

import os
from functools import partial

import pytest
import torch

from benchmarks.compare import append, compare, rows_of
from benchmarks.variants import versions
from fastgrpo.kernels import reference

CUDA = torch.cuda.is_available()
SMALL = os.environ.get("FASTGRPO_BENCH_SMALL") == "1" or not CUDA
DEVICE = "cuda" if CUDA else "cpu"
ROUNDS = 2 if SMALL else 50
MISSING = {} if CUDA else {"fastgrpo": "needs a CUDA device"}
PROMPTS, GROUP, PROMPT, SUFFIX = (2, 2, 32, 8) if SMALL else (16, 16, 2048, 512)
HEADS = {"0.5B": (14, 2, 64), "7B": (28, 4, 128)}  # H, K, d
ROWS, VOCAB = (4, 512) if SMALL else (256, 151_936)
FILTERS = {"no filter": {}, "top_k 20": {"top_k": 20}, "top_p 0.95": {"top_p": 0.95},
           "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95}}  # fmt: skip


def report(benchmark, capsys, name, results, bars, call, **description):
    """Rows into extra_info and, at full size, into results/; bars: name -> (value, at most)."""
    if MISSING:
        with capsys.disabled():
            print(*(f"\nmissing: {variant}: {reason}" for variant, reason in MISSING.items()))
    rows = rows_of(results, MISSING, **versions(), benchmark=name, **description)
    benchmark.extra_info.update(
        rows=rows,
        missing=MISSING,
        bars={bar: {"value": value, "at most": most, "met": value <= most} for bar, (value, most) in bars.items()},
    )
    if not SMALL:
        append(rows, DEVICE)
    benchmark.pedantic(call, rounds=ROUNDS)


@pytest.mark.parametrize("model", HEADS)
def test_group_decode(benchmark, capsys, model):
    heads, key_heads, depth = HEADS[model]
    lanes, dtype = PROMPTS * GROUP, torch.bfloat16 if CUDA else torch.float32
    options = {"dtype": dtype, "device": DEVICE}
    query = torch.randn(lanes, heads, depth, **options)
    prompt = torch.randn(2, PROMPTS, key_heads, PROMPT, depth, **options)
    suffix = torch.randn(2, lanes, key_heads, SUFFIX, depth, **options)
    whole = torch.cat([prompt.repeat_interleave(GROUP, dim=1), suffix], dim=3)

    def sdpa():
        keys, values = whole
        return torch.nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)[
            :, :, 0
        ]

    variants = {"sdpa": sdpa}
    if CUDA:
        from fastgrpo.kernels.group_decode import group_decode

        def integers(*shape, value):
            return torch.full(shape, value, dtype=torch.int32, device=DEVICE)

        members = torch.arange(lanes, dtype=torch.int32, device=DEVICE).view(PROMPTS, GROUP)
        own, prompts = integers(lanes, value=SUFFIX), integers(PROMPTS, value=PROMPT)
        variants["fastgrpo"] = partial(group_decode, query, *suffix, own, *prompt, prompts, members, scale=depth**-0.5)
        variants["fastgrpo, nothing shared"] = partial(
            group_decode, query, *whole, own + PROMPT, *prompt, prompts, integers(PROMPTS, 1, value=-1),
            scale=depth**-0.5,
        )  # fmt: skip
        expected = sdpa()
        for name, call in variants.items():
            torch.testing.assert_close(call(), expected, rtol=2e-2, atol=2e-3, msg=name)
    results = compare(variants, ROUNDS, DEVICE)
    bars = {}
    if CUDA:
        mine = results["fastgrpo"]["median_s"]
        for other in ("fastgrpo, nothing shared", "sdpa"):
            bars[f"time, of {other}"] = (round(mine / results[other]["median_s"], 3), round(1 / 1.5, 3))
    report(benchmark, capsys, "group_decode", results, bars, variants["fastgrpo" if CUDA else "sdpa"], n=lanes,
           d=heads * depth, v=PROMPT + SUFFIX, dtype=str(dtype)[6:], case=f"{model}, G = {GROUP}")  # fmt: skip


@pytest.mark.parametrize("case", FILTERS)
def test_sample(benchmark, capsys, case):
    logits, uniforms = torch.randn(ROWS, VOCAB, device=DEVICE) * 2.5, torch.rand(ROWS, device=DEVICE)
    params = {"temperature": 0.8, **FILTERS[case]}
    variants = {"plain torch": partial(reference.sample, logits, uniforms, **params)}
    if CUDA:
        from fastgrpo.kernels.sampling import sample

        variants["fastgrpo"] = partial(sample, logits, uniforms, **params)
        same = (variants["fastgrpo"]()[0] == variants["plain torch"]()[0]).float().mean()
        assert same > 0.9, same  # fp32 sums in another order move some boundaries
    results = compare(variants, ROUNDS, DEVICE)
    bars = {}
    if CUDA:
        ratio = results["fastgrpo"]["median_s"] / results["plain torch"]["median_s"]
        bars["time, of plain torch"] = (round(ratio, 3), 0.2)
    report(benchmark, capsys, "sample", results, bars, variants["fastgrpo" if CUDA else "plain torch"], n=ROWS, d=1,
           v=VOCAB, dtype="float32", case=case)  # fmt: skip
