r"""Compute mathematical expressions, at a cost that the lengths of their texts bound.

An expression is computed while it is read, as a decimal number of ``DIGITS`` digits. Letters are variables, which have
values at a few fixed points, so that expressions in them can be compared there. Nothing is simplified, expanded or
solved, no clock is read, and every thread gets the same values.
"""

import random
import re
from decimal import Context, Decimal, DecimalException, DivisionByZero, InvalidOperation, Overflow, localcontext

# The text of a model is untrusted input. Within these bounds the costliest answer takes some hundredths of a second.
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

_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[()\[\]]|[.\s]+\Z", ""),
        (r"\\([{}])", r"\1"),
        (r"×|·|\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"÷|\\div(?![A-Za-z])", "/"),
        (r"\\pi(?![A-Za-z])", "π"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    )
]
_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\[A-Za-z]+|[-+*/^()\[\]{}=,πA-Za-z])")
CLOSING = {"(": ")", "[": "]", "{": "}"}
_MIXED = re.compile(r"([0-9]+) (?:([0-9]+) / ([0-9]+)|\\frac { ([0-9]+) } { ([0-9]+) })(?= |\Z)")

Values = list[Decimal | None]  # those of an expression at each point, None where it is not defined


class Unreadable(ValueError):
    """The text is no expression, has no value, or is beyond the bounds of this module."""


def tokenize(text: str) -> list[str]:
    r"""Split a text into numbers, letters, commands and signs.

    Args:
        text: An expression, or several with commas and signs = between them.

    Returns:
        The tokens.

    Raises:
        Unreadable: The text is too long, or holds what is no part of an expression.

    Example:
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

    Args:
        tokens: The tokens of the expression.

    Returns:
        Its ``POINTS`` values, which are all the same where it has no variables.

    Raises:
        Unreadable: The tokens are no such expression, it is defined at no point, or it is beyond the bounds.

    Example:
        >>> evaluate(tokenize(r"\frac{3}{2} + 2^{-1}"))[0]
        Decimal('2.0')
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
    return values


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
        return sign * self.product()

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
        whole, numerator, denominator = (Decimal(digits) for digits in mixed.groups() if digits)
        return whole + numerator / denominator

    def power(self) -> Decimal:
        """Read an operand and its exponent."""
        base = self.operand()
        if self.next() != "^":
            return base
        self.take()
        exponent = -self.operand() if self.next() == "-" and self.take() else self.operand()
        if self.next() == "^" or abs(exponent) > MAX_EXPONENT:
            raise Unreadable(f"an exponent is a number up to {MAX_EXPONENT}, and a power of a power has brackets")
        if base == 0 and exponent < 0:  # an infinite power raises nothing
            raise DivisionByZero
        return base**exponent

    def operand(self) -> Decimal:
        """Read a number, a letter, a command with its arguments, or what stands in brackets."""
        token = self.take()
        if _is_number(token):
            return Decimal(token)
        if token in ("π", "e"):
            return _PI if token == "π" else _E
        if token.isalpha():
            return self.variable(token)
        if token in CLOSING:
            return self.group(CLOSING[token])
        if token == r"\frac":
            return self.argument() / self.argument()
        if token == r"\sqrt":
            degree = self.group("]") if self.next() == "[" and self.take() else Decimal(2)
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

    def variable(self, letter: str) -> Decimal:
        """Return the coordinate of a variable at the point."""
        low, high = (0.5, 2) if self.point < POINTS / 2 else (-2, 2)
        return Decimal(random.Random(f"{letter.lower()} {self.point}").uniform(low, high))

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


def _is_number(token: str) -> bool:
    return token[:1] in tuple("0123456789.")
