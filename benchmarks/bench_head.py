"""The fused head at the sizes of real models on a GPU: ours, full logits, TRL, Liger, cut-cross-entropy, bare products.

Shapes: N rows (tokens), V vocabulary, D hidden. bf16, gradients of hidden [N, D] and weight [V, D], with all rows
active and with 42% of them (60% valid tokens, 70% groups with a signal). The variants run in turns; what ours is held
to is reported in `extra_info["bars"]` and never asserted. Peers that are not installed, or fail, are named as missing
with the reason, in the output and in the results. `make bench-gpu` runs all of it within 8 minutes on one card and
appends to results/<gpu>.jsonl.

A row's `tflops` counts the products that the mathematics needs (2 M V D each for M active rows; three with gradients,
one without), whatever the variant computes; `error_logp` is the largest error against fp64 in nats, `error_hidden` and
`error_weight` are norms relative to the fp64 gradients.

    pytest benchmarks/bench_head.py --benchmark-only
    FASTGRPO_BENCH_SMALL=1: tiny shapes and two rounds, on the CPU in fp32, to see that it runs; nothing is written to
    results/, and torch.compile is called without its compiler.
"""

import os
from functools import partial
from typing import NamedTuple

import pytest
import torch

from benchmarks import variants
from benchmarks.compare import append, compare, rows_of

SMALL = os.environ.get("FASTGRPO_BENCH_SMALL") == "1"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
ROUNDS = 2 if SMALL else 20
SECONDS = 20  # of rounds for one shape and share of active rows
CHUNK_ROWS = (64, 128) if SMALL else (2048, 4096, 16384)  # beside the default of 8192
ACTIVE = 0.42
SPARE_BYTES = 2**28  # what the memory bar allows beyond the formula


class Shape(NamedTuple):
    """N x D x V, tokens of a sequence, the active shares that are run, and the bars: see `bars_of`."""

    n: int
    d: int
    v: int
    length: int = 1024
    shares: tuple = (1.0, ACTIVE)
    step_bar: float | None = None
    forward_bar: float | None = None
    active_bar: float | None = None


SHAPES = (
    [Shape(256, 16, 2048, 64, step_bar=1.1, forward_bar=1.15, active_bar=0.5), Shape(128, 16, 2048, 64, shares=(1.0,))]
    if SMALL
    else [
        Shape(8192, 896, 151936, step_bar=1.10, forward_bar=1.15, active_bar=0.50),
        Shape(16384, 2048, 151936, step_bar=1.08, forward_bar=1.10, active_bar=0.46),
        Shape(8192, 4096, 128256, step_bar=1.05, forward_bar=1.07, active_bar=0.50),
        Shape(2048, 896, 151936, shares=(1.0,)),  # for time and memory against N
        Shape(16384, 896, 151936, shares=(1.0,)),
    ]
)


def heads_of(shape):
    """(variant -> function of a batch, variant -> why it is missing)."""
    heads = {"fastgrpo": variants.fastgrpo}
    heads |= {f"fastgrpo, chunks of {c}": variants.fastgrpo_chunks(c) for c in CHUNK_ROWS if c <= shape.n}
    heads["fastgrpo, forward only"] = variants.fastgrpo_forward
    heads["full logits"] = variants.full_logits
    heads["full logits, compiled"] = variants.full_logits_compiled("aot_eager" if SMALL else "inductor")
    peers, missing = variants.peers(compiled=not SMALL)
    floors = {"bare products": variants.bare_products, "one product": variants.one_product}
    return {**heads, **peers, **floors}, missing


def errors_of(result, truth):
    """Against fp64: of log-probs [N], or of the gradients (hidden [N, D], weight [V, D])."""
    if isinstance(result, torch.Tensor):
        return {"error_logp": (result.double() - truth.logps).abs().max().item()}
    hidden, weight = result
    return {
        "error_hidden": variants.relative_error(hidden, truth.hidden),
        "error_weight": variants.relative_error(weight, truth.weight),
    }


def figures(name, head, batch, truth):
    """One call: the errors of a head; the products that a variant's TFLOP/s are counted in."""
    result = head(batch)
    floor = name in ("bare products", "one product")
    return {
        "products": 1 if name in ("one product", "fastgrpo, forward only") else 3,
        **{key: float(f"{error:.3g}") for key, error in ({} if floor else errors_of(result, truth)).items()},
    }


def bars_of(shape, results):
    """share -> variant -> figures of `compare`, as bar -> (value, at most).

    Time of a step against the bare products of the same rows, of a forward against one product, with few active rows
    against all of them, against every peer; and memory against the formula of docs/loss.md.
    """
    every = results[1.0]

    def ratio(mine, other):
        return round(mine["median_s"] / other["median_s"], 3)

    bars = {}
    if shape.step_bar:
        bars["time, of the bare products"] = ratio(every["fastgrpo"], every["bare products"]), shape.step_bar
        bars["forward time, of one product"] = (
            ratio(every["fastgrpo, forward only"], every["one product"]),
            shape.forward_bar,
        )
    if shape.active_bar:
        active = ratio(results[ACTIVE]["fastgrpo"], every["fastgrpo"])
        bars[f"time with {ACTIVE:.0%} active, of all"] = active, shape.active_bar
    for share, measured in results.items():
        for name in ("full logits", "full logits, compiled", *variants.PEERS):
            if name in measured:
                bars[f"time, of {name}, {share:.0%} active"] = ratio(measured["fastgrpo"], measured[name]), 1.0
    if CUDA and not SMALL:
        from fastgrpo.kernels.launch import CHUNK_ROWS as DEFAULT

        allowed = 2 * min(DEFAULT, shape.n) * shape.v + (4 * shape.v * shape.d if shape.n > DEFAULT else 0)
        bars["peak memory, of the formula"] = round(every["fastgrpo"]["peak_bytes"] / (allowed + SPARE_BYTES), 3), 1.0
    return bars


def run(shape, share, batch, heads, missing):
    """(figures of `compare`, rows, missing) with one share of active rows; a peer that fails joins the missing."""
    batch = batch.masked(share)
    truth = variants.truth(batch)
    calls, extras, missing = {}, {}, dict(missing)
    for name, head in heads.items():
        try:
            extras[name] = figures(name, head, batch, truth)
        except Exception as error:  # a peer's bug, or a card too small for the full logits, ends no benchmark
            if name.startswith("fastgrpo"):
                raise
            missing[name] = f"failed: {type(error).__name__}: {error}"[:300]
            continue
        calls[name] = partial(head, batch)
    del truth
    measured = compare(calls, ROUNDS, DEVICE, SECONDS)
    for name, result in measured.items():
        products = extras[name].pop("products")
        flops = 2 * products * len(batch.rows) * shape.v * shape.d
        extras[name]["tflops"] = float(f"{flops / result['median_s'] / 1e12:.3g}")
    rows = rows_of(
        measured, missing, extras, **variants.versions(), benchmark="head", n=shape.n, d=shape.d, v=shape.v,
        dtype=str(DTYPE).removeprefix("torch."), active_rows=len(batch.rows),
        case="all rows" if share == 1 else f"{share:.0%} of the rows",
    )  # fmt: skip
    return measured, rows, missing


@pytest.mark.skipif(not (CUDA or SMALL), reason="needs a CUDA device at these sizes; FASTGRPO_BENCH_SMALL=1 without")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.n}x{shape.d}x{shape.v}")
def test_head(benchmark, capsys, shape):
    torch.compiler.reset()
    heads, missing = heads_of(shape)
    batch = variants.make_batch(shape.n, shape.d, shape.v, length=shape.length, dtype=DTYPE, device=DEVICE)
    results, rows, failed = {}, [], {}
    for share in shape.shares:
        results[share], new, not_run = run(shape, share, batch, heads, missing)
        rows += new
        failed |= not_run
        if not SMALL:
            append(new, DEVICE)
    with capsys.disabled():
        for name, reason in failed.items():
            print(f"\nmissing: {name}: {reason}")
    bars = bars_of(shape, results)
    benchmark.extra_info.update(
        rows=rows,
        missing=failed,
        bars={name: {"value": value, "at most": bar, "met": value <= bar} for name, (value, bar) in bars.items()},
    )
    benchmark.pedantic(partial(variants.fastgrpo, batch), rounds=ROUNDS)
