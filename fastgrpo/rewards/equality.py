r"""Tell whether two answers that are expressions, equations or lists of these have the same values."""

import re
from decimal import Decimal, localcontext
from typing import NamedTuple

from fastgrpo.rewards.expressions import CLOSING, CONTEXT, TOLERANCE, Unreadable, Values, evaluate, tokenize

_HALF_MILLIONTH = Decimal("5e-7")  # a number that is all of an answer may be rounded: 1.414214 is the square root of 2
_LONE_DECIMAL = re.compile(r"\s*[-+]?[0-9]*\.[0-9]+\s*")


class _Item(NamedTuple):
    """An expression or an equation."""

    left: Values | None  # the first side of an equation
    is_named: bool  # an equation such as x = 2, whose first side is a letter
    right: Values  # the last side of an equation, or the expression


def same_values(answer: str, expected: str) -> bool | None:
    r"""Tell whether two answers have the same values. Each is an expression, an equation, or a list of these.

    The items of ``a, b`` and ``{a, b}`` may have any order, and those of ``(a, b)`` and ``[a, b]`` have that of the
    expected answer. ``a \pm b`` is a list of two. Two equations are the same where one is a multiple of the other.
    Where only the answer is an equation, its last side counts, and so does that of an expected ``x = 2``.

    Args:
        answer: The answer to judge. It is wrong where it cannot be read.
        expected: The right answer.

    Returns:
        Whether they match. None where the expected answer cannot be read.

    Example:
        >>> same_values(r"x^2 - 1, \sqrt{8}", r"2\sqrt{2}, (x + 1)(x - 1)")
        True
    """
    try:
        brackets, items = _items(expected)
    except Unreadable:
        return None
    try:
        answer_brackets, answer_items = _items(answer)
    except Unreadable:
        return False
    if len(items) != len(answer_items) or (brackets != answer_brackets and {brackets, answer_brackets} != {"", "()"}):
        return False
    is_rounded = any(_LONE_DECIMAL.fullmatch(text) for text in (answer, expected))
    tolerance = _HALF_MILLIONTH if is_rounded else TOLERANCE
    for item in items:
        candidates = answer_items[:1] if brackets else answer_items
        match = next((i for i, other in enumerate(candidates) if _match(item, other, tolerance)), None)
        if match is None:
            return False
        del answer_items[match]
    return True


def _items(text: str) -> tuple[str, list[_Item]]:
    """Return the brackets of a list, "" where its order does not matter, and its items."""
    tokens = tokenize(text)
    brackets, parts = "", _split(tokens, ",")
    inner = _split(tokens[1:-1], ",")
    if len(parts) == 1 and len(inner) > 1:
        brackets, parts = tokens[0] + tokens[-1], inner
    if brackets == "{}":
        brackets = ""
    if brackets == "[]" and len(parts) > 2:  # no interval
        brackets = "()"
    if brackets not in ("", "()", "[]", "(]", "[)"):
        raise Unreadable(f"{text!r} is no list")
    items = []
    for part in parts:
        for sign in "+-" if r"\pm" in part else "+":
            first, *others = _split([sign if token == r"\pm" else token for token in part], "=")
            is_named = bool(others) and len(first) == 1 and first[0].isalpha()
            left = evaluate(first) if others else None
            items.append(_Item(left, is_named, evaluate(others[-1] if others else first)))
    return brackets, items


def _split(tokens: list[str], separator: str) -> list[list[str]]:
    """Split tokens at each separator outside of brackets."""
    parts, depth = [[]], 0
    for token in tokens:
        depth += (token in CLOSING) - (token in CLOSING.values())
        if token == separator and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _match(item: _Item, answer: _Item, tolerance: Decimal) -> bool:
    """Tell whether an item of the answer is the expected one."""
    if item.left is None or (item.is_named and answer.left is None):
        return _agree(item.right, answer.right, tolerance)
    if answer.left is None:
        return False
    if item.is_named and answer.is_named:
        return _agree(item.left, answer.left) and _agree(item.right, answer.right)
    return _agree(_scaled(item), _scaled(answer))


def _scaled(equation: _Item) -> Values:
    """Subtract the sides of an equation, and divide by the first difference that is not zero."""
    with localcontext(CONTEXT):
        pairs = zip(equation.left, equation.right, strict=True)
        differences = [None if a is None or b is None else a - b for a, b in pairs]
        unit = next((value for value in differences if value is not None and abs(value) > TOLERANCE), 1)
        return [None if value is None else value / unit for value in differences]


def _agree(some: Values, others: Values, tolerance: Decimal = TOLERANCE) -> bool:
    """Tell whether values are equal wherever they are defined, which is at the same points and at one at least."""
    with localcontext(CONTEXT):
        both = [(a, b) for a, b in zip(some, others, strict=True) if a is not None or b is not None]
        return bool(both) and all(
            None not in pair and abs(pair[0] - pair[1]) <= max(tolerance, TOLERANCE * max(map(abs, pair)))
            for pair in both
        )
