"""What all benchmarks share: where they run, the bars that they are held to, and how each of them ends.

With FASTGRPO_BENCH_SMALL=1 a benchmark takes tiny shapes and two rounds, to show that it runs; nothing is then written
to results/.
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
    """Return the name of a dtype as results have it.

    Args:
        dtype: Such as torch.bfloat16, whose name is "bfloat16".
    """
    return str(dtype).removeprefix("torch.")


def at_most(value: float, limit: float) -> Bar:
    """Judge a figure that a benchmark wants to be small.

    Args:
        value: What was measured.
        limit: The largest value that meets the bar.
    """
    return {"value": round(value, 3), "at most": limit, "met": value <= limit}


def at_least(value: float, limit: float) -> Bar:
    """Judge a figure that a benchmark wants to be large.

    Args:
        value: What was measured.
        limit: The smallest value that meets the bar.
    """
    return {"value": round(value, 3), "at least": limit, "met": value >= limit}


def none_of(failures: int, complete: bool) -> Bar:
    """Judge a count of failures, which is no good news where not all of them could be seen.

    Args:
        failures: How many were seen.
        complete: Whether all that could fail has run to its end.
    """
    return {**at_most(failures, 0), "met": complete and failures == 0, "complete": complete}


def in_words(bar: Bar) -> dict[str, Any]:
    """Return a bar as tables have it: "measured", the "limit" in words, and whether it was "met".

    Args:
        bar: What `at_most`, `at_least` or `none_of` returned.
    """
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
    """End a benchmark: report and save what it measured, and let pytest-benchmark time one variant for its table.

    A bar that is not met is reported and fails nothing: a neighbour's load on a shared machine is no regression.

    Args:
        benchmark: The fixture, whose `extra_info` gets the rows, the missing variants and the bars.
        capsys: The fixture that holds back output; the missing variants are printed past it.
        rows: What `rows_of` made of the results. The first one is saved with the bars.
        bars: By name, what `at_most` and `at_least` judged.
        call: The variant that pytest-benchmark times.
        rounds: Calls that it times.
        missing: The reason for each variant that was not run.
        keep: Whether to add the rows to results/.
    """
    missing = missing or {}
    with capsys.disabled():
        for name, reason in missing.items():
            print(f"\nmissing: {name}: {reason}")
    benchmark.extra_info.update(rows=rows, missing=missing, bars=bars)
    if keep:
        append([{**rows[0], "bars": bars}, *rows[1:]], DEVICE)
    benchmark.pedantic(call, rounds=rounds)
