"""Numbers modulo the prime: their arithmetic is that of fractions."""

from decimal import DivisionByZero
from fractions import Fraction

import pytest

from fastgrpo.rewards.residues import PRIME, Residue

A, B = Fraction(22, 7), Fraction(-5, 3)


@pytest.mark.parametrize(
    ("residue", "value"),
    [
        (Residue(A) + Residue(B), A + B),
        (Residue(A) - Residue(B), A - B),
        (Residue(A) * Residue(B), A * B),
        (Residue(A) / Residue(B), A / B),
        (-Residue(A), -A),
        (Residue(A).power(5), A**5),
        (Residue(A).power(-2), A**-2),
        (Residue(7).power(0), 1),
    ],
)
def test_the_arithmetic_is_that_of_fractions(residue, value):
    assert residue.value == Residue(value).value


def test_nothing_is_divided_by_zero():
    for divide in (lambda: Residue(1) / Residue(PRIME), lambda: Residue(0).power(-1)):
        with pytest.raises(DivisionByZero):
            divide()


@pytest.mark.parametrize(
    ("value", "whole"), [(9, 9), (-9, -9), (0, 0), (10, None), (-10, None), (Fraction(1, 2), None)]
)
def test_the_whole_number_of_a_residue(value, whole):
    assert Residue(value).whole(9) == whole
