"""The head at the sizes of real models on one GPU: fastgrpo, full logits, TRL, Liger, cut-cross-entropy, bare products.

Shapes: N tokens, V vocabulary, D hidden, bf16. Each head computes the GRPO loss and its gradients of hidden [N, D] and
weight [V, D], with all tokens active and with 42% of them (60% of the tokens valid, 70% of the groups with a signal).
A peer that is not installed, or that fails, is reported as missing with the reason, in the output and in the results.
`make bench-gpu` runs everything within 8 minutes on one GPU and adds to results/<gpu>.jsonl.

The `tflops` of a row count only the necessary products, for every variant: 2 M V D each for M active tokens, three with
gradients, one without. `error_logp` is the largest error in nats against fp64. `error_hidden` and `error_weight` are
errors in norm, relative to the fp64 gradients.

    pytest benchmarks/bench_head.py --benchmark-only

With FASTGRPO_BENCH_SMALL=1 the shapes are tiny, nothing is written, it also runs on a CPU, and torch.compile uses no
compiler.
"""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import variants
from benchmarks.batches import Batch, Truth, make_batch, relative_error, truth
from benchmarks.compare import compare, rows_of
from benchmarks.harness import CUDA, DEVICE, DTYPE, SMALL, Bar, at_most, finish, name_of
from benchmarks.peers import PEERS, peers

ROUNDS = 2 if SMALL else 20
SECONDS = 20  # time limit of the rounds for one shape and one share of active tokens
CHUNK_ROWS = (64, 128) if SMALL else (2048, 4096, 16384)  # in addition to the default of 8192
ACTIVE = 0.42
SPARE_BYTES = 2**28  # slack of the memory bar beyond the formula
FLOORS = ("bare products", "one product")

Results = dict[str, dict[str, float]]  # variant -> what `compare` measured
Heads = dict[str, variants.Head]


class Shape(NamedTuple):
    """A shape, and fastgrpo's bars for it."""

    n: int  # tokens
    d: int  # width of the hidden states
    v: int  # size of the vocabulary
    length: int = 1024  # tokens of a sequence
    shares: tuple[float, ...] = (1.0, ACTIVE)  # of active tokens
    step_bar: float | None = None  # time of forward and backward, relative to the bare products of the same tokens
    forward_bar: float | None = None  # time of a forward pass without gradients, relative to one product
    active_bar: float | None = None  # time with 42% of the tokens active, relative to all active


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


def heads_of(shape: Shape) -> tuple[Heads, dict[str, str]]:
    """Return all variants for a shape by name, and the reason for each peer that does not run."""
    heads = {"fastgrpo": variants.fastgrpo}
    heads |= {f"fastgrpo, chunks of {c}": variants.fastgrpo_chunks(c) for c in CHUNK_ROWS if c <= shape.n}
    heads["fastgrpo, forward only"] = variants.fastgrpo_forward
    heads["full logits"] = variants.full_logits
    heads["full logits, compiled"] = variants.full_logits_compiled("aot_eager" if SMALL else "inductor")
    others, missing = peers(compiled=not SMALL)
    floors = {"bare products": variants.bare_products, "one product": variants.one_product}
    return {**heads, **others, **floors}, missing


def errors_of(result: torch.Tensor | variants.Gradients, expected: Truth) -> dict[str, float]:
    """Compare log-probs [N], or gradients of hidden [N, D] and weight [V, D], with fp64."""
    if isinstance(result, torch.Tensor):
        return {"error_logp": (result.double() - expected.logps).abs().max().item()}
    hidden, weight = result
    return {
        "error_hidden": relative_error(hidden, expected.hidden),
        "error_weight": relative_error(weight, expected.weight),
    }


def figures(name: str, head: variants.Head, batch: Batch, expected: Truth) -> dict[str, float]:
    """Call a head once, and return its errors and the number of "products" for its TFLOP/s."""
    result = head(batch)
    errors = {} if name in FLOORS else errors_of(result, expected)
    return {
        "products": 1 if name in ("one product", "fastgrpo, forward only") else 3,
        **{key: float(f"{error:.3g}") for key, error in errors.items()},
    }


def bars_of(shape: Shape, results: dict[float, Results]) -> dict[str, Bar]:
    """Return the bars of a shape: its own, the time of every peer, and the memory formula of docs/loss.md."""
    every = results[1.0]

    def ratio(mine: dict[str, float], other: dict[str, float]) -> float:
        return mine["median_s"] / other["median_s"]

    bars = {}
    if shape.step_bar:
        bars["time, of the bare products"] = at_most(ratio(every["fastgrpo"], every["bare products"]), shape.step_bar)
        forward = ratio(every["fastgrpo, forward only"], every["one product"])
        bars["forward time, of one product"] = at_most(forward, shape.forward_bar)
    if shape.active_bar:
        active = ratio(results[ACTIVE]["fastgrpo"], every["fastgrpo"])
        bars[f"time with {ACTIVE:.0%} active, of all"] = at_most(active, shape.active_bar)
    for share, measured in results.items():
        for name in ("full logits", "full logits, compiled", *PEERS):
            if name in measured:
                bars[f"time, of {name}, {share:.0%} active"] = at_most(ratio(measured["fastgrpo"], measured[name]), 1.0)
    if CUDA and not SMALL:
        from fastgrpo.kernels.launch import CHUNK_ROWS as DEFAULT

        allowed = 2 * min(DEFAULT, shape.n) * shape.v + (4 * shape.v * shape.d if shape.n > DEFAULT else 0)
        bars["peak memory, of the formula"] = at_most(every["fastgrpo"]["peak_bytes"] / (allowed + SPARE_BYTES), 1.0)
    return bars


def run(
    shape: Shape, share: float, batch: Batch, heads: Heads, missing: dict[str, str]
) -> tuple[Results, list[dict[str, Any]], dict[str, str]]:
    """Measure all variants with one share of active tokens.

    Returns the results of `compare`, their rows, and `missing` with the reasons of the peers that failed.
    """
    batch = batch.masked(share)
    expected = truth(batch)
    calls, extras, missing = {}, {}, dict(missing)
    for name, head in heads.items():
        try:
            extras[name] = figures(name, head, batch, expected)
        except Exception as error:  # such as a bug of a peer, or too little memory for the full logits
            if name.startswith("fastgrpo"):
                raise
            missing[name] = f"failed: {type(error).__name__}: {error}"[:300]
            continue
        calls[name] = partial(head, batch)
    del expected
    measured = compare(calls, ROUNDS, DEVICE, SECONDS)
    for name, result in measured.items():
        products = extras[name].pop("products")
        flops = 2 * products * len(batch.rows) * shape.v * shape.d
        extras[name]["tflops"] = float(f"{flops / result['median_s'] / 1e12:.3g}")
    rows = rows_of(
        measured, missing, extras, benchmark="head", n=shape.n, d=shape.d, v=shape.v, dtype=name_of(DTYPE),
        active_rows=len(batch.rows),
        case="all rows" if share == 1 else f"{share:.0%} of the rows",
    )  # fmt: skip
    return measured, rows, missing


@pytest.mark.skipif(not (CUDA or SMALL), reason="needs a CUDA device at these sizes; FASTGRPO_BENCH_SMALL=1 without")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.n}x{shape.d}x{shape.v}")
def test_head(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], shape: Shape) -> None:
    torch.compiler.reset()
    heads, missing = heads_of(shape)
    batch = make_batch(shape.n, shape.d, shape.v, length=shape.length, dtype=DTYPE, device=DEVICE)
    results, rows, failed = {}, [], {}
    for share in shape.shares:
        results[share], new, not_run = run(shape, share, batch, heads, missing)
        rows += new
        failed |= not_run
    mine = partial(variants.fastgrpo, batch)
    finish(benchmark, capsys, rows, bars_of(shape, results), mine, ROUNDS, missing=failed)
