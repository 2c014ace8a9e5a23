"""The loss: linear_grpo_loss against full logits in plain PyTorch and against TRL's fused head.

Shapes: N tokens, V vocabulary, D hidden, fp32. Each variant computes the clipped GRPO loss and its gradients of hidden
[N, D] and weight [V, D], with all tokens active and with 40% of them, forward and backward. The benchmark asserts that
all variants give the same gradients. The bare products are the three matrix products that any head needs, for all
logits at once, without a loss.

    pytest benchmarks/bench_loss.py --benchmark-only

Results are added to results/<device>.jsonl. With FASTGRPO_BENCH_SMALL=1 the shapes are tiny and nothing is written.
"""

from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.batches import make_batch
from benchmarks.compare import compare, rows_of
from benchmarks.harness import DEVICE, SMALL, at_most, finish
from benchmarks.peers import trl_head
from benchmarks.variants import Gradients, bare_products, fastgrpo, full_logits

N, D, V = (256, 16, 2048) if SMALL else (2048, 512, 32768)
ROUNDS = 2 if SMALL else 5
ACTIVE = 0.4
LENGTH = 128  # tokens of a sequence
FLOOR = "bare products"


def assert_same_gradients(gradients: Gradients, expected: Gradients) -> None:
    """Assert that gradients are equal up to the rounding of fp32 sums."""
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


def test_linear_grpo_loss(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]) -> None:
    heads, missing = {"fastgrpo": fastgrpo, "full logits": full_logits, FLOOR: bare_products}, {}
    try:
        heads["trl"] = trl_head()
    except ImportError as error:
        missing["trl"] = f"not installed: {error}"
    every = make_batch(N, D, V, length=LENGTH, dtype=torch.float32, device=DEVICE)
    batches = {"all rows": every, f"{ACTIVE:.0%} of the rows": every.masked(ACTIVE)}
    variants = {}
    for case, batch in batches.items():
        expected = full_logits(batch)
        for head, function in heads.items():
            if head != FLOOR:
                assert_same_gradients(function(batch), expected)
            variants[head, case] = partial(function, batch)
    results = compare(variants, ROUNDS, DEVICE)

    def ratio(key: str, one: tuple[str, str], other: tuple[str, str]) -> float:
        return results[one][key] / results[other][key]

    all_rows, some_rows = batches
    mine = "fastgrpo", all_rows
    bars = {
        "time, of three bare products": at_most(ratio("median_s", mine, (FLOOR, all_rows)), 1.05),
        "time, of full logits": at_most(ratio("median_s", mine, ("full logits", all_rows)), 1.0),
        "peak memory, of full logits": at_most(ratio("peak_bytes", mine, ("full logits", all_rows)), 0.2),
        f"time at {some_rows}, of its own at all": at_most(ratio("median_s", ("fastgrpo", some_rows), mine), 0.55),
    }
    if "trl" in heads:
        bars["time, of trl"] = at_most(ratio("median_s", mine, ("trl", all_rows)), 1.0)
    rows = []
    for case in batches:
        chosen = {head: results[head, case] for head in heads}
        rows += rows_of(chosen, missing, benchmark="linear_grpo_loss", n=N, d=D, v=V, dtype="float32", case=case)
    finish(benchmark, capsys, rows, bars, variants[mine], ROUNDS, missing=missing)
