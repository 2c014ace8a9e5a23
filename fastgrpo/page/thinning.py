"""Thins long curves for the page, so that a browser opens a run of 10,000 steps at once and no spike is lost.

A curve of more points than the page takes is cut into buckets of equal length, and the smallest and the largest value
of each bucket stay. A moving average over such extremes would not be that of the curve, so the mean of all values since
the kept point before goes along with each.
"""

from collections.abc import Sequence
from itertools import pairwise

POINTS = 2000  # a curve at most; a chart on a page is narrower


def kept_of(values: Sequence[float], points: int = POINTS) -> list[int]:
    """Choose which points of a curve stay."""
    if len(values) <= points:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for low, high in _buckets(len(values), points):
        kept.add(min(range(low, high), key=values.__getitem__))
        kept.add(max(range(low, high), key=values.__getitem__))
    return sorted(kept)


def stretches_of(values: Sequence[float], kept: Sequence[int]) -> tuple[list[float], list[int]]:
    """Average the stretch that each kept point stands for: the values behind the kept point before it, up to itself."""
    spans = [(before + 1, place + 1) for before, place in pairwise([-1, *kept])]
    return [sum(values[low:high]) / (high - low) for low, high in spans], [high - low for low, high in spans]


def _buckets(count, points):
    """Cut `count` places into buckets, of which each may keep two points, and the ends of the curve one each."""
    number = points // 2 - 1
    return [(i * count // number, (i + 1) * count // number) for i in range(number)]
