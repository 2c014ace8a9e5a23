r"""Tell whether two answers that are expressions, equations or lists of these have the same values."""

import re
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import NamedTuple

from fastgrpo.rewards.expressions import CLOSING, CONTEXT, TOLERANCE, Unreadable, Values, evaluate, tokenize

_HALF_MILLIONTH = Decimal("5e-7")  # a number that is all of an answer may be rounded: 1.414214 is the square root of 2
_TEN_THOUSANDTH = Decimal("1e-4")  # but for its leading digits
_ROUNDED = re.compile(r"\s*[-+]?[0-9]*\.[0-9]{6,}\s*")
_ZERO = Decimal("1e-100")  # what rounding leaves of a difference of equal values
_JOINTS = re.compile(r",? ?(?<![\\A-Za-z])(?:and|or)(?![A-Za-z])|;|\\(?:cup|lor)(?![A-Za-z])|∪")


class _Item(NamedTuple):
    """An expression or an equation."""

    left: Values | None  # the first side of an equation, None where it only names something
    is_equation: bool
    is_named: bool  # an equation such as x = 2 or f(x) = 2, whose first side is a name
    right: Values  # the last side of an equation, or the expression


class Formula(NamedTuple):
    """An answer that was read: a list, perhaps of one item.

    Attributes:
        brackets: What encloses the items, ":" where it separates them, and "" where their order does not matter.
        items: Expressions, equations, or lists of these.
        tolerance: How far another value may be, or None where the values are exact.
    """

    brackets: str
    items: list
    tolerance: Decimal | None = None


@lru_cache(maxsize=256)  # a reference is read once for all completions of its prompt
def read_formula(text: str) -> Formula | None:
    r"""Read an expression, an equation, or a list of these."""
    try:
        brackets, items = _list(tokenize(_JOINTS.sub(",", text)))
    except Unreadable:
        return None
    if _ROUNDED.fullmatch(text):
        return Formula(brackets, items, min(_HALF_MILLIONTH, _TEN_THOUSANDTH * abs(Decimal(text.strip()))))
    return Formula(brackets, items)


def same_values(answer: str, expected: str) -> bool | None:
    r"""Tell whether two answers have the same values. Each is an expression, an equation, or a list of these.

    The items of ``a, b`` and ``{a, b}`` may have any order, and those of ``(a, b)`` and ``[a, b]`` have that of the
    expected answer. ``a \pm b`` is a list of two. Two equations are the same where one is a multiple of the other.
    Where only the answer is an equation, its last side counts, and so does that of an expected ``x = 2``.

    Examples:
        >>> same_values(r"x^2 - 1, \sqrt{8}", r"2\sqrt{2}, (x + 1)(x - 1)")
        True
    """
    read, right = read_formula(answer), read_formula(expected)
    if right is None or read is None:
        return None if right is None else False
    tolerances = [side.tolerance for side in (read, right) if side.tolerance is not None]
    return _same_lists(read, right, max(tolerances, default=None))


def _list(tokens: list[str]) -> tuple[str, list]:
    """Return the brackets of a list and its items."""
    brackets, parts = "", _split(tokens, ",")
    inner = _split(tokens[1:-1], ",")
    if len(parts) == 1 and len(inner) > 1:
        brackets, parts = tokens[0] + tokens[-1], inner
    elif len(parts) == 1 and len(ratio := _split(tokens, ":")) > 1:
        brackets, parts = ":", ratio
    if brackets == "{}":
        brackets = ""
    if brackets == "[]" and len(parts) > 2:  # no interval
        brackets = "()"
    if brackets not in ("", ":", "()", "[]", "(]", "[)"):
        raise Unreadable("this is no list")
    items = []
    for part in parts:
        if len(parts) > 1 and len(_split(part[1:-1], ",")) > 1:  # a list in a list
            items.append(Formula(*_list(part)))
            continue
        for signs in ("+-", "-+") if {r"\pm", r"\mp"} & {*part} else ("",):
            spelled = dict(zip((r"\pm", r"\mp"), signs, strict=False))
            items.append(_item([spelled.get(token, token) for token in part]))
    return brackets, items


def _item(tokens: list[str]) -> _Item:
    """Read an expression or an equation."""
    first, *others = _split(tokens, "=")
    if not others:
        return _Item(None, False, False, evaluate(first))
    last = others[-1]
    if _is_name(last) and not _is_name(first):  # 2 = x
        first, last = last, first
    try:
        left = evaluate(first)
    except Unreadable:
        left = None
    return _Item(left, True, left is None or _is_name(first), evaluate(last))


def _is_name(tokens: list[str]) -> bool:
    """Tell whether tokens are letters, or a letter with letters in brackets behind it."""
    letters = tokens[2:-1] if tokens[1:2] == ["("] and tokens[-1] == ")" else tokens[1:]
    return all(token == "," or token.isalpha() for token in tokens[:1] + letters) and bool(tokens)


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


def _same_lists(answer: Formula, expected: Formula, tolerance: Decimal | None) -> bool:
    """Tell whether lists have the same items, in the order that the expected one asks for."""
    pair = {answer.brackets, expected.brackets}
    if len(answer.items) != len(expected.items) or (len(pair) == 2 and pair != {"", "()"}):
        return False
    remaining = list(answer.items)
    for item in expected.items:
        candidates = remaining[:1] if expected.brackets else remaining
        match = next((i for i, other in enumerate(candidates) if _match(item, other, tolerance)), None)
        if match is None:
            return False
        del remaining[match]
    return True


def _match(item: _Item | Formula, answer: _Item | Formula, tolerance: Decimal | None) -> bool:
    """Tell whether an item of the answer is the expected one."""
    if isinstance(item, Formula) or isinstance(answer, Formula):
        return type(item) is type(answer) and _same_lists(answer, item, tolerance)
    if not item.is_equation or (item.is_named and not answer.is_equation):
        return _agree(item.right, answer.right, tolerance)
    if not answer.is_equation:
        return False
    if item.is_named and answer.is_named:
        names = (item.left, answer.left)
        if (None in names or _agree(*names)) and _agree(item.right, answer.right, tolerance):
            return True
    return None not in (item.left, answer.left) and _agree(_scaled(item), _scaled(answer))


def _scaled(equation: _Item) -> Values:
    """Subtract the sides of an equation, and divide by the first difference that is not zero."""
    with localcontext(CONTEXT):
        pairs = zip(equation.left.decimals, equation.right.decimals, strict=True)
        differences = [None if a is None or b is None else a - b for a, b in pairs]
        unit = next((value for value in differences if value is not None and abs(value) > _ZERO), 1)
        return Values([None if value is None else value / unit for value in differences], None)


def _agree(some: Values, others: Values, tolerance: Decimal | None = None) -> bool:
    """Tell whether values are equal wherever both are defined, which is at one point at least."""
    if tolerance is None and None not in (some.residue, others.residue) and some.residue != others.residue:
        return False
    with localcontext(CONTEXT):
        both = [
            pair
            for pair in zip(some.decimals, others.decimals, strict=True)
            if pair[0] is not None and pair[1] is not None
        ]
        return bool(both) and all(
            abs(a - b) <= max(tolerance or _ZERO, TOLERANCE * max(abs(a), abs(b))) for a, b in both
        )
