"""The rewards of the logged completions as a histogram over time, from samples.jsonl."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastgrpo.page.reading import finite
from fastgrpo.page.sample_file import SampleFile

BINS = 24
COLUMNS = 200  # at most; more logged steps are joined, so many to a column


def reward_histogram(folder: Path, weights: Sequence[float] = ()) -> dict[str, Any] | None:
    """Count how often which total reward was given, step by step."""
    totals = _totals(folder / "samples.jsonl", weights)
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


def _totals(path, weights):
    """Read the total rewards of each step. What a resumed run wrote again counts once, as in the sample browser."""
    factors = weights if isinstance(weights, (list, tuple)) and all(finite(one) is not None for one in weights) else ()
    totals = {}
    try:
        with open(path, "rb") as file:
            samples = SampleFile(file)
            for step, blocks in samples.steps.items():
                rows = (row for block in blocks for row in samples.read(step, block))
                found = [total for row in rows if (total := _total(row.get("rewards"), factors)) is not None]
                if found:
                    totals[step] = found
    except OSError:
        return {}
    return totals


def _total(rewards, weights):
    """Add the rewards of one completion as the run did; None where it has none. A reward that is null was not given."""
    if not isinstance(rewards, dict):
        return None
    factors = weights if len(weights) == len(rewards) else [1.0] * len(rewards)
    given = [
        factor * value for factor, value in zip(factors, rewards.values(), strict=True) if finite(value) is not None
    ]
    return finite(sum(given)) if given else None


def _edges(totals):
    """Choose the edges of the bins: around each value where few lie on a grid, otherwise of equal width."""
    values = sorted({round(value, 9) for step in totals.values() for value in step})
    low, high = values[0], values[-1]
    if low == high:
        return [low - 0.5, low + 0.5] if abs(low) < 1e9 else [low - abs(low) / 2, low + abs(low) / 2]
    gap = min(after - before for before, after in itertools.pairwise(values))
    places = [(value - low) / gap for value in values] if high - low < 1e15 else [BINS]
    on_grid = places[-1] < BINS and all(abs(place - round(place)) < 1e-6 for place in places)
    if on_grid:  # as 0 and 1, or a number of right answers: each value in the middle of its own bin
        return [_short(low + (i - 0.5) * gap) for i in range(round(places[-1]) + 2)]
    width = high / BINS - low / BINS
    return [_short(low + i * width) for i in range(BINS)] + [_short(high + width / 1e6)]


def _count(values, edges):
    counts, width = [0] * (len(edges) - 1), edges[1] - edges[0]
    for value in values:
        counts[min(max(int(value / width - edges[0] / width), 0), len(counts) - 1)] += 1
    return counts


def _short(value):
    return float(f"{value:.7g}")
