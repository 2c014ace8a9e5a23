r"""Numbers modulo a prime, which tell 2^{2014} from 2^{2014} - 1 where a decimal number has too few digits.

A sum, a product or a quotient of residues is the residue of the exact result, at a cost that does not grow with the
result. Equal values have equal residues, and different ones differ but for a chance of 1 in 10^38.
"""

from decimal import DivisionByZero
from fractions import Fraction

PRIME = 2**127 - 1


class Residue:
    """A number modulo the prime.

    Examples:
        >>> (Residue(Fraction(1, 3)) + Residue(2)).value == Residue(Fraction(7, 3)).value
        True
    """

    def __init__(self, value: int | Fraction):
        fraction = Fraction(value)
        self.value = fraction.numerator * pow(fraction.denominator, -1, PRIME) % PRIME

    def __add__(self, other: "Residue") -> "Residue":
        return Residue(self.value + other.value)

    def __sub__(self, other: "Residue") -> "Residue":
        return Residue(self.value - other.value)

    def __neg__(self) -> "Residue":
        return Residue(-self.value)

    def __mul__(self, other: "Residue") -> "Residue":
        return Residue(self.value * other.value)

    def __truediv__(self, other: "Residue") -> "Residue":
        return self * other.power(-1)

    def power(self, exponent: int) -> "Residue":
        """Compute a power."""
        if self.value == 0 and exponent < 0:
            raise DivisionByZero
        return Residue(pow(self.value, exponent, PRIME))

    def whole(self, largest: int) -> int | None:
        """Return the whole number that this is the residue of."""
        for value in (self.value, self.value - PRIME):
            if abs(value) <= largest:
                return value
        return None
