"""Long curves keep their spikes, their ends and their means, and short ones stay whole."""

import random

from fastgrpo.page.thinning import POINTS, kept_of, means_of


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
    means = means_of(values, kept, 402)
    assert len(means) == len(kept) and len(kept) <= 402
    assert sum(values[place] for place in kept) / len(kept) > 0.45
    assert abs(sum(means) / len(means) - 0.1) < 0.01


def test_means_of_points_that_another_curve_chose():
    assert means_of([1.0, 3.0, 10.0, 30.0], [0, 1, 3], points=6) == [2.0, 2.0, 20.0]
