"""The kernels of a rollout: decode attention with a shared prompt against SDPA, sampling against plain PyTorch.

Attention is one layer of one decode step of 16 groups of 16 lanes with Qwen2.5's heads in bf16. Its variants are
fastgrpo's kernel with one prompt per group, the same kernel with one prompt per lane, and SDPA with one prompt per
lane. Sampling draws one token for each of 256 lanes from a vocabulary of 151,936, with the filters of `FILTERS`. The
benchmark asserts that all variants give the same result.

    pytest benchmarks/bench_decode.py --benchmark-only

Results are added to results/<device>.jsonl. With FASTGRPO_BENCH_SMALL=1, and without a GPU, the shapes are tiny and
nothing is written. Without a GPU the Triton kernels are reported as missing.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import harness
from benchmarks.compare import compare, rows_of
from benchmarks.harness import CUDA, DEVICE, DTYPE, at_most, finish, name_of
from benchmarks.models import QWEN
from fastgrpo.kernels import reference

SMALL = harness.SMALL or not CUDA
ROUNDS = 2 if SMALL else 50
MISSING = {} if CUDA else {"fastgrpo": "needs a CUDA device"}
PROMPTS, GROUP, PROMPT_TOKENS, SUFFIX_TOKENS = (2, 2, 32, 8) if SMALL else (16, 16, 2048, 512)
SIZES = {"0.5B": QWEN["0.5b"], "7B": QWEN["7b"]}
LANES, VOCAB = (4, 512) if SMALL else (256, 151_936)  # lanes and vocabulary of sampling
FILTERS = {"no filter": {}, "top_k 20": {"top_k": 20}, "top_p 0.95": {"top_p": 0.95},
           "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95}}  # fmt: skip


def attention_variants(heads: int, key_heads: int, depth: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Return variants of one decode step's attention over equal random tensors; each returns [lanes, heads, depth]."""
    lanes, options = PROMPTS * GROUP, {"dtype": DTYPE, "device": DEVICE}
    query = torch.randn(lanes, heads, depth, **options)
    prompt = torch.randn(2, PROMPTS, key_heads, PROMPT_TOKENS, depth, **options)
    suffix = torch.randn(2, lanes, key_heads, SUFFIX_TOKENS, depth, **options)
    whole = torch.cat([prompt.repeat_interleave(GROUP, dim=1), suffix], dim=3)

    def sdpa() -> torch.Tensor:
        keys, values = whole
        out = torch.nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
        return out[:, :, 0]

    if not CUDA:
        return {"sdpa": sdpa}
    from fastgrpo.kernels.decode import group_decode

    def integers(*shape: int, value: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=DEVICE)

    members = torch.arange(lanes, dtype=torch.int32, device=DEVICE).view(PROMPTS, GROUP)
    own, prompts = integers(lanes, value=SUFFIX_TOKENS), integers(PROMPTS, value=PROMPT_TOKENS)
    shared = partial(group_decode, query, *suffix, own, *prompt, prompts, members, scale=depth**-0.5)
    nothing_shared = partial(
        group_decode, query, *whole, own + PROMPT_TOKENS, *prompt, prompts, integers(PROMPTS, 1, value=-1),
        scale=depth**-0.5,
    )  # fmt: skip
    return {"sdpa": sdpa, "fastgrpo": shared, "fastgrpo, nothing shared": nothing_shared}


@pytest.mark.parametrize("model", SIZES)
def test_group_decode(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], model: str) -> None:
    heads, key_heads, depth = SIZES[model].heads, SIZES[model].kv_heads, SIZES[model].head_dim
    variants = attention_variants(heads, key_heads, depth)
    expected = variants["sdpa"]()
    for name, call in variants.items():
        torch.testing.assert_close(call(), expected, rtol=2e-2, atol=2e-3, msg=name)
    results = compare(variants, ROUNDS, DEVICE)
    bars = {}
    if CUDA:
        mine = results["fastgrpo"]["median_s"]
        for other in ("fastgrpo, nothing shared", "sdpa"):
            bars[f"time, of {other}"] = at_most(mine / results[other]["median_s"], round(1 / 1.5, 3))
    rows = rows_of(results, MISSING, benchmark="group_decode", n=PROMPTS * GROUP, d=heads * depth,
                   v=PROMPT_TOKENS + SUFFIX_TOKENS, dtype=name_of(DTYPE), case=f"{model}, G = {GROUP}")  # fmt: skip
    call = variants["fastgrpo" if CUDA else "sdpa"]
    finish(benchmark, capsys, rows, bars, call, ROUNDS, missing=MISSING, keep=not SMALL)


@pytest.mark.parametrize("case", FILTERS)
def test_sample(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], case: str) -> None:
    logits, uniforms = torch.randn(LANES, VOCAB, device=DEVICE) * 2.5, torch.rand(LANES, device=DEVICE)
    params = {"temperature": 0.8, **FILTERS[case]}
    variants, bars = {"plain torch": partial(reference.sample, logits, uniforms, **params)}, {}
    if CUDA:
        from fastgrpo.kernels.sampling import sample

        variants["fastgrpo"] = partial(sample, logits, uniforms, **params)
        same = (variants["fastgrpo"]()[0] == variants["plain torch"]()[0]).float().mean()
        assert same > 0.9, same  # fp32 sums in another order move some boundaries
    results = compare(variants, ROUNDS, DEVICE)
    if CUDA:
        bars["time, of plain torch"] = at_most(
            results["fastgrpo"]["median_s"] / results["plain torch"]["median_s"], 0.2
        )
    rows = rows_of(results, MISSING, benchmark="sample", n=LANES, d=1, v=VOCAB, dtype="float32", case=case)
    call = variants["fastgrpo" if CUDA else "plain torch"]
    finish(benchmark, capsys, rows, bars, call, ROUNDS, missing=MISSING, keep=not SMALL)
