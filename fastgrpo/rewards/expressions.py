r"""Compute mathematical expressions, at a cost that the lengths of their texts bound.

An expression is computed while it is read, as a decimal number of ``DIGITS`` digits. Letters are variables, which have
values at a few fixed points, so that expressions in them can be compared there. Where it has no roots, it is computed
modulo a prime as well, which tells 2^{2014} from 2^{2014} - 1. Nothing is simplified, expanded or solved, no clock is
read, and every thread gets the same values.
"""

import random
import re
from decimal import Context, Decimal, DecimalException, DivisionByZero, InvalidOperation, Overflow, localcontext
from fractions import Fraction
from typing import NamedTuple

from fastgrpo.rewards.residues import Residue

# The text of a model is untrusted input. Within these bounds the costliest answer takes about a tenth of a second.
MAX_LENGTH = 300  # characters; a longer answer is prose
MAX_DEPTH = 16  # brackets in brackets; each takes a few frames of Python's stack, which holds 1,000
MAX_EXPONENT = 10_000  # largest exponent, and largest power of ten of an intermediate value
DIGITS = 120  # those of two numbers of 60 digits that are multiplied
POINTS = 4  # where variables are compared: two points have positive coordinates only, two have those of both signs

CONTEXT = Context(
    prec=DIGITS, Emax=MAX_EXPONENT, Emin=-MAX_EXPONENT, traps=[InvalidOperation, DivisionByZero, Overflow]
)
TOLERANCE = Decimal("1e-80")  # a step rounds at 1e-120, so differences may cancel 40 leading digits
_E = Decimal(1).exp(CONTEXT)
_PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808651"
    "328230664709384460955058223172535940812848111745028410270193852"
)

_BRACKETS = {r"\lbrace": "{", r"\rbrace": "}", r"\lbrack": "[", r"\rbrack": "]", r"\langle": "(", r"\rangle": ")"}
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[()\[\]]|[.\s]+\Z", ""),
        (r"\\([{}])", r"\1"),
        (r"\\[lr](?:brace|brack|angle)(?![A-Za-z])", lambda match: _BRACKETS[match[0]]),
        (r"×|·|\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"÷|\\div(?![A-Za-z])", "/"),
        (r"\\pi(?![A-Za-z])", "π"),
        (r"\\infty(?![A-Za-z])", "∞"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    )
]
_TOKEN = re.compile(
    r"\s*((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2}(?![0-9A-Za-z]))?|\\[A-Za-z]+"
    r"|[-+*/^()\[\]{}=,π∞A-Za-z]|(?<=[0-9]):(?=[0-9]))"
)
CLOSING = {"(": ")", "[": "]", "{": "}"}
_MIXED = re.compile(r"([0-9]+) (?:([0-9]+) / ([0-9]+)|\\frac { ([0-9]+) } { ([0-9]+) })(?= |\Z)")


class Values(NamedTuple):
    """The values of an expression.

    Attributes:
        decimals: One at each point, None where the expression is not defined.
        residue: The value modulo `fastgrpo.rewards.residues.PRIME`, where the variables are other numbers. None where
            there is none.
    """

    decimals: list[Decimal | None]
    residue: int | None


class Unreadable(ValueError):
    """The text is no expression, has no value, or is beyond the bounds of this module."""


def tokenize(text: str) -> list[str]:
    r"""Split a text into numbers, letters, commands and signs.

    Examples:
        >>> tokenize(r"2 \times \sqrt3")
        ['2', '*', '\\sqrt', '3']
    """
    if len(text) > MAX_LENGTH:
        raise Unreadable(f"an expression has at most {MAX_LENGTH} characters, not {len(text)}")
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != "".join(text.split()):
        raise Unreadable(f"{text!r} holds what is no part of an expression")
    return tokens


def evaluate(tokens: list[str]) -> Values:
    r"""Compute an expression at each of the fixed points.

    Numbers, their signs and operators, brackets, ``\frac``, ``\sqrt``, powers, pi, e, and letters as variables are
    read. A product without a sign binds closer than a slash, and a number before a fraction of numbers is the whole
    part of a mixed number.

    Examples:
        >>> values = evaluate(tokenize(r"\frac{3}{2} + 2^{-1}"))
        >>> values.decimals[0], values.residue
        (Decimal('2.0'), 2)
    """
    values = []
    with localcontext(CONTEXT):
        for point in range(POINTS):
            try:
                values.append(_Reader(tokens, point).whole())
            except DecimalException:  # a division by zero, 0^0, or a value out of bounds
                values.append(None)
    if all(value is None for value in values):
        raise Unreadable("the expression has no value")
    try:
        residue = _ModularReader(tokens, 0).whole().value
    except (Unreadable, DecimalException):
        residue = None
    return Values(values, residue)


class _Reader:
    """Computes an expression at one point while reading its tokens from left to right, by recursive descent."""

    def __init__(self, tokens: list[str], point: int):
        self.tokens, self.point = [*tokens, ""], point  # "" is the end
        self.at = self.depth = 0

    def next(self) -> str:
        """Return the next token."""
        return self.tokens[self.at]

    def take(self) -> str:
        """Return the next token, and go on to the one behind it."""
        self.at += 1
        return self.tokens[self.at - 1]

    def whole(self) -> Decimal:
        """Read all tokens."""
        value = self.sum()
        if self.next():
            raise Unreadable(f"{self.next()!r} has no place in an expression")
        return value

    def sum(self) -> Decimal:
        """Read terms between signs + and -."""
        value = self.quotient()
        while self.next() in ("+", "-"):
            value = value + self.quotient() if self.take() == "+" else value - self.quotient()
        return value

    def quotient(self) -> Decimal:
        """Read factors between signs * and /."""
        value = self.signed()
        while self.next() in ("*", "/"):
            value = value * self.signed() if self.take() == "*" else value / self.signed()
        return value

    def signed(self) -> Decimal:
        """Read a product and the signs before it."""
        sign = 1
        while self.next() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        value = self.product()
        return -value if sign < 0 else value

    def product(self) -> Decimal:
        """Read factors that stand side by side."""
        value = self.mixed()
        while self.next() not in ("", "+", "-", "*", "/", *CLOSING.values()):
            if _is_number(self.next()) and _is_number(self.tokens[self.at - 1]):
                raise Unreadable("two numbers stand side by side")
            value *= self.power()
        return value

    def mixed(self) -> Decimal:
        """Read a whole number and the fraction behind it as their sum, or a power."""
        mixed = _MIXED.match(" ".join(self.tokens[self.at : self.at + 8]))
        if mixed is None:
            return self.power()
        self.at += len(mixed[0].split())
        whole, numerator, denominator = (self.number(digits) for digits in mixed.groups() if digits)
        return whole + numerator / denominator

    def power(self) -> Decimal:
        """Read an operand and its exponent."""
        base = self.operand()
        if self.next() != "^":
            return base
        self.take()
        exponent = -self.operand() if self.next() == "-" and self.take() else self.operand()
        if self.next() == "^":
            raise Unreadable("a power of a power has brackets")
        return self.raised(base, exponent)

    def operand(self) -> Decimal:
        """Read a number, a letter, a command with its arguments, or what stands in brackets."""
        token = self.take()
        if _is_number(token):
            return self.number(token)
        if token in ("π", "e"):
            return self.constant(token)
        if token.isalpha() or token == "∞":
            return self.variable(token)
        if token in CLOSING:
            return self.group(CLOSING[token])
        if token == r"\frac":
            return self.argument() / self.argument()
        if token == r"\sqrt":
            degree = self.group("]") if self.next() == "[" and self.take() else self.number("2")
            return self.root(self.argument(), degree)
        raise Unreadable(f"{token!r} begins no expression")

    def group(self, closing: str) -> Decimal:
        """Read what stands behind an opening bracket, and the closing one."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable(f"more than {MAX_DEPTH} brackets are open")
        value = self.sum()
        if self.take() != closing:
            raise Unreadable(f"a bracket is not closed by {closing}")
        self.depth -= 1
        return value

    def argument(self) -> Decimal:
        """Read the argument of a command, which is an operand or one digit."""
        token = self.next()
        if token.isdigit():
            self.tokens[self.at : self.at + 1] = [token[0], *([token[1:]] if token[1:] else [])]
        elif self.next() == r"\frac" or self.next() == r"\sqrt":
            raise Unreadable("a command that is an argument has braces")
        return self.operand()

    def number(self, digits: str) -> Decimal:
        """Return the value of a number."""
        return Decimal(digits)

    def constant(self, name: str) -> Decimal:
        """Return pi or e."""
        return _PI if name == "π" else _E

    def folded(self, letter: str) -> str:
        """Return a letter in lower case, unless the expression has it in both cases."""
        return letter if letter.swapcase() in self.tokens else letter.lower()

    def variable(self, letter: str) -> Decimal:
        """Return the coordinate of a variable at the point."""
        low, high = (0.5, 2) if self.point < POINTS / 2 else (-2, 2)
        return Decimal(random.Random(f"{self.folded(letter)} {self.point}").uniform(low, high))

    def raised(self, base: Decimal, exponent: Decimal) -> Decimal:
        """Compute a power."""
        if abs(exponent) > MAX_EXPONENT:
            raise Unreadable(f"an exponent is a number up to {MAX_EXPONENT}")
        if base == 0 and exponent < 0:  # an infinite power raises nothing
            raise DivisionByZero
        return base**exponent

    def root(self, value: Decimal, degree: Decimal) -> Decimal:
        """Compute a root. Of a negative number, it is negative where the degree is odd, and the square root has i."""
        if degree % 1 or not 2 <= degree <= MAX_EXPONENT:
            raise Unreadable(f"a root has a whole degree from 2 to {MAX_EXPONENT}")
        if degree == 2:
            return value.sqrt() if value >= 0 else self.variable("i") * (-value).sqrt()
        root = abs(value) ** (1 / degree)
        if value >= 0:
            return root
        if degree % 2 == 0:
            raise Unreadable("a negative number has no real root of an even degree")
        return -root


class _ModularReader(_Reader):
    """Computes an expression without roots modulo the prime, where pi and e are numbers like the variables."""

    def number(self, digits: str) -> Residue:
        """Return the value of a number."""
        return Residue(Fraction(digits))

    def constant(self, name: str) -> Residue:
        """Return what stands for pi or e."""
        return Residue(random.Random(name).getrandbits(127))

    def variable(self, letter: str) -> Residue:
        """Return what stands for a variable."""
        return Residue(random.Random(f"{self.folded(letter)} 0").getrandbits(127))

    def raised(self, base: Residue, exponent: Residue) -> Residue:
        """Compute a power, where the exponent is whole."""
        if (whole := exponent.whole(MAX_EXPONENT)) is None:
            raise Unreadable("the exponent is not whole")
        return base.power(whole)

    def root(self, value: Residue, degree: Residue) -> Residue:
        """Refuse a root."""
        raise Unreadable("a root has several values modulo a prime")


def _is_number(token: str) -> bool:
    return token[:1] in tuple("0123456789.")
