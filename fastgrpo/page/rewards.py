"""The rewards of the logged completions as a histogram over time, from samples.jsonl."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastgrpo.page.reading import json_lines

BINS = 24
COLUMNS = 200  # at most; more logged steps are joined, so many to a column


def reward_histogram(folder: Path, weights: Sequence[float] = ()) -> dict[str, Any] | None:
    """Count how often which total reward was given, step by step.

    Args:
        folder: The folder of the run.
        weights: The weight of each reward function in their order; empty where each counts 1.

    Returns:
        The last step of each column (`step`), the edges of the bins (`edges`, one more than bins), how many completions
        have a reward in each bin (`counts`, a list a column), and what the figures rest on (`note`). None where
        samples.jsonl holds no reward.
    """
    totals = {}
    for row in json_lines(folder / "samples.jsonl"):
        total = _total(row.get("rewards"), weights)
        if total is not None and isinstance(row.get("step"), int):
            totals.setdefault(row["step"], []).append(total)
    if not totals:
        return None
    steps, number = sorted(totals), sum(map(len, totals.values()))
    edges = _edges(totals)
    width = -(-len(steps) // COLUMNS)
    columns = [steps[at : at + width] for at in range(0, len(steps), width)]
    counts = [_count([value for step in column for value in totals[step]], edges) for column in columns]
    joined = f" {width} logged steps are joined to a column." if width > 1 else ""
    note = (
        f"It rests on the {number:,} completions that samples.jsonl kept of {len(steps):,} logged steps, about "
        f"{number / len(steps):.0f} a step.{joined}"
    )
    return {"step": [column[-1] for column in columns], "edges": edges, "counts": counts, "note": note}


def _total(rewards, weights):
    """Add the rewards of one completion as the run did; None where it has none. A reward that is null was not given."""
    if not isinstance(rewards, dict):
        return None
    factors = weights if len(weights) == len(rewards) else [1.0] * len(rewards)
    given = [factor * value for factor, value in zip(factors, rewards.values(), strict=True) if _is_number(value)]
    return sum(given) if given else None


def _is_number(value):
    return isinstance(value, (int, float)) and math.isfinite(value)


def _edges(totals):
    """Choose the edges of the bins: around each value where there are few, otherwise of equal width."""
    values = sorted({round(value, 9) for step in totals.values() for value in step})
    if len(values) == 1:
        return [values[0] - 0.5, values[0] + 0.5]
    gap = min(high - low for low, high in itertools.pairwise(values))
    low, high = values[0], values[-1]
    bins = round((high - low) / gap) + 1
    if bins <= BINS:  # as 0 and 1, or a number of right answers: each value in the middle of its own bin
        return [_short(low + (i - 0.5) * gap) for i in range(bins + 1)]
    return [_short(low + i * (high - low) / BINS) for i in range(BINS)] + [_short(high + (high - low) / 1e6)]


def _count(values, edges):
    counts, width = [0] * (len(edges) - 1), edges[1] - edges[0]
    for value in values:
        counts[min(max(int((value - edges[0]) / width), 0), len(counts) - 1)] += 1
    return counts


def _short(value):
    return float(f"{value:.7g}")
