"""Long curves keep their spikes, their ends and their means, and short ones stay whole."""

import random

import pytest

from fastgrpo.page.payload import POINTS, kept_of, stretches_of


def test_a_short_curve_stays_whole():
    assert kept_of([0.5] * POINTS) == list(range(POINTS))


def test_a_long_curve_keeps_its_spikes_and_its_ends():
    values = [random.Random(step).random() for step in range(10_001)]
    values[6_543], values[6_544] = 1000.0, -1000.0
    kept = kept_of(values)
    assert len(kept) <= POINTS and kept == sorted(set(kept))
    assert {0, 6_543, 6_544, 10_000} <= set(kept)


def test_the_mean_of_a_stretch_goes_along_with_its_points():
    """Most values are 0 and every tenth is 1: the kept points alone would average to a half."""
    values = [float(step % 10 == 0) for step in range(10_000)]
    kept = kept_of(values, 402)
    means, lines = stretches_of(values, kept)
    assert len(means) == len(lines) == len(kept) <= 402 and sum(lines) == 10_000
    assert sum(values[place] for place in kept) / len(kept) > 0.45
    assert sum(mean * count for mean, count in zip(means, lines, strict=True)) == pytest.approx(1_000)


def test_stretches_of_points_that_another_curve_chose():
    assert stretches_of([1.0, 3.0, 10.0, 30.0], [0, 1, 3]) == ([1.0, 3.0, 20.0], [1, 1, 2])
