"""Common parts of all benchmarks: device, bars, and the report at the end.

With FASTGRPO_BENCH_SMALL=1 a benchmark uses tiny shapes and two rounds, to test that it runs, and writes nothing to
results/.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.compare import append

SMALL = os.environ.get("FASTGRPO_BENCH_SMALL") == "1"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32

Bar = dict[str, Any]


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in results, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def at_most(value: float, limit: float) -> Bar:
    """Return a bar that is met if the measured value is at most the limit."""
    return {"value": round(value, 3), "at most": limit, "met": value <= limit}


def at_least(value: float, limit: float) -> Bar:
    """Return a bar that is met if the measured value is at least the limit."""
    return {"value": round(value, 3), "at least": limit, "met": value >= limit}


def none_of(failures: int, complete: bool) -> Bar:
    """Return a bar that is met if there are no failures and `complete`: everything that could fail has finished."""
    return {**at_most(failures, 0), "met": complete and failures == 0, "complete": complete}


def in_words(bar: Bar) -> dict[str, Any]:
    """Return a bar for tables: "measured", the "limit" in words, and whether it was "met"."""
    kind = "at most" if "at most" in bar else "at least"
    unseen = "" if bar.get("complete", True) else ", and not all ran"
    return {"measured": bar["value"], "limit": f"{kind} {bar[kind]:g}{unseen}", "met": bar["met"]}


def finish(
    benchmark: BenchmarkFixture,
    capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]],
    bars: dict[str, Bar],
    call: Callable[[], Any],
    rounds: int,
    *,
    missing: dict[str, str] | None = None,
    keep: bool = not SMALL,
) -> None:
    """End a benchmark: report and save its results, and let pytest-benchmark time one variant for its table.

    A bar that is not met is reported, but does not fail the test: load on a shared machine is not a regression. With
    `keep`, the rows are added to results/, the first one with the bars.
    """
    missing = missing or {}
    with capsys.disabled():
        for name, reason in missing.items():
            print(f"\nmissing: {name}: {reason}")
    benchmark.extra_info.update(rows=rows, missing=missing, bars=bars)
    if keep:
        append([{**rows[0], "bars": bars}, *rows[1:]], DEVICE)

    def finished():
        call()
        if CUDA:  # its kernels, and not only their launches
            torch.cuda.synchronize()

    finished()
    benchmark.pedantic(finished, rounds=rounds)
