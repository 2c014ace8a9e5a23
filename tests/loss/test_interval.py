"""Ranges of numbers: what they allow, and how a refusal words them."""

import math
import re

import pytest

from fastgrpo.loss.interval import Interval


@pytest.mark.parametrize(
    "interval, text, inside, outside",
    [
        (Interval(), "finite", (-5, 0, 1e9), ()),
        (Interval(above=0), "positive", (1e-9, 7), (0, -1)),
        (Interval(above=2), "above 2", (2.1,), (2, 1)),
        (Interval(at_least=2), "at least 2", (2, 3), (1,)),
        (Interval(at_most=2), "at most 2", (2, -3), (2.1,)),
        (Interval(below=2), "below 2", (1,), (2,)),
        (Interval(above=0, at_most=1), r"in \(0, 1\]", (0.1, 1), (0, 1.1)),
        (Interval(at_least=0, below=1), r"in \[0, 1\)", (0, 0.9), (1, -0.1)),
        (Interval(at_least=2, or_zero=True), "0 or at least 2", (0, 2, 3), (1, -1)),
    ],
)
def test_intervals(interval, text, inside, outside):
    for value in inside:
        interval.check("x", value)
    for value in outside:
        with pytest.raises(ValueError, match=f"^x must be {text}, got {value}$"):
            interval.check("x", value)
    for value in ("1", None, True, [1], 1j):
        with pytest.raises(ValueError, match=f"^x must be a number, got {re.escape(repr(value))}$"):
            interval.check("x", value)
    with pytest.raises(ValueError, match=r"^x must be finite, got a whole number that no float can hold$"):
        interval.check("x", 10**400)
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=f"^x must be finite, got {value}$"):
            interval.check("x", value)
