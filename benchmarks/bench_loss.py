"""linear_grpo_loss against full logits in plain PyTorch and against TRL's fused head, forward and backward.

Shapes: N rows (tokens), V vocabulary, D hidden. Every variant computes the clipped GRPO loss and the gradients of
hidden [N, D] and weight [V, D], with all rows active and with 40% of them. The variants run in turns; what they are
held to is reported in `extra_info["bars"]` and never asserted: the neighbours of a shared machine are no regression.

    pytest benchmarks/bench_loss.py --benchmark-only
    FASTGRPO_BENCH_SMALL=1: tiny shapes and two rounds, to see that it runs; nothing is written to results/.
"""

import os
from functools import partial

import torch

from benchmarks.compare import append, compare, rows_of
from benchmarks.variants import fastgrpo, full_logits, make_batch, trl_head, versions

SMALL = os.environ.get("FASTGRPO_BENCH_SMALL") == "1"
N, D, V = (256, 16, 2048) if SMALL else (2048, 512, 32768)
ROUNDS = 2 if SMALL else 5
ACTIVE = 0.4
LENGTH = 128  # tokens of a sequence
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def same_gradients(gradients, expected):
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


def test_linear_grpo_loss(benchmark, capsys):
    heads, missing = {"fastgrpo": fastgrpo, "full logits": full_logits}, {}
    try:
        heads["trl"] = trl_head()
    except ImportError as error:
        missing["trl"] = f"not installed: {error}"
        with capsys.disabled():
            print(f"\nmissing: trl: {missing['trl']}")
    every = make_batch(N, D, V, length=LENGTH, dtype=torch.float32, device=DEVICE)
    some = every.masked(ACTIVE)
    batches = {"all rows": every, f"{ACTIVE:.0%} of the rows": some}
    variants = {}
    for case, batch in batches.items():
        expected = full_logits(batch)
        for head, function in heads.items():
            same_gradients(function(batch), expected)
            variants[head, case] = partial(function, batch)
    results = compare(variants, ROUNDS, DEVICE)

    def ratio(key, one, other):
        return round(results[one][key] / results[other][key], 3)

    all_rows, some_rows = batches
    mine = "fastgrpo", all_rows
    bars = {
        "time, of full logits": (ratio("median_s", mine, ("full logits", all_rows)), 1.0),
        "peak memory, of full logits": (ratio("peak_bytes", mine, ("full logits", all_rows)), 0.2),
        f"time at {some_rows}, of its own at all": (ratio("median_s", ("fastgrpo", some_rows), mine), 0.55),
    }
    if "trl" in heads:
        bars["time, of trl"] = (ratio("median_s", mine, ("trl", all_rows)), 1.0)
    rows = []
    for case in batches:
        chosen = {head: results[head, case] for head in heads}
        rows += rows_of(
            chosen, missing, **versions(), benchmark="linear_grpo_loss", n=N, d=D, v=V, dtype="float32", case=case
        )
    benchmark.extra_info.update(
        rows=rows,
        missing=missing,
        bars={name: {"value": value, "at most": bar, "met": value <= bar} for name, (value, bar) in bars.items()},
    )
    if not SMALL:
        append(rows, DEVICE)
    benchmark.pedantic(variants[mine], rounds=ROUNDS)
