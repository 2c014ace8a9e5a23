"""The reward functions of countdown: an expression of the given numbers that has the target as its value.

The text of a model is untrusted and never runs. Python's parser turns it into a tree with only whole numbers and the
four operations, which is computed in exact fractions. Limits on length and depth bound the cost. The columns `nums` and
`target` hold the numbers of each puzzle and its target.
"""

import ast
import operator
import re
from collections import Counter
from fractions import Fraction
from typing import Any

from fastgrpo.rewards.answers import completion_text
from fastgrpo.rewards.guard import plain, shown

MAX_LENGTH = 100  # characters of an expression: six numbers with all their operators and brackets have fewer
MAX_DEPTH = 8  # operations inside one another
FORMAT_REWARD = 0.1

_OPENING, _CLOSING = "<answer>", "</answer>"
_READABLE = re.compile(r"[0-9+*/() -]+")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def correctness(prompts: list, completions: list, nums: list, target: list, **columns: Any) -> list[float]:
    """Return 1.0 for an expression that equals the target and uses each number at most once, else 0.0.

    Raises:
        ValueError: One of the columns does not hold whole numbers.

    Examples:
        >>> correctness(["?"] * 2, ["<answer>(3+7)*2</answer>", "<answer>3+7+7</answer>"], [[2, 3, 7]] * 2, [20, 17])
        [1.0, 0.0]
    """
    values, goals = _values(completions, nums), [_whole("target", goal) for goal in target]
    return [float(value is not None and value == goal) for value, goal in zip(values, goals, strict=True)]


def format_reward(prompts: list, completions: list, nums: list, **columns: Any) -> list[float]:
    """Return 0.1 for an answer that uses each number at most once, with any value, else 0.0.

    Raises:
        ValueError: The column `nums` does not hold a list of whole numbers.
    """
    return [FORMAT_REWARD * (value is not None) for value in _values(completions, nums)]


format_reward.full_mark = FORMAT_REWARD  # the format rate of an evaluation is the share of completions that get this


def _values(completions, nums):
    """Compute the answer of each completion, or None."""
    texts = [completion_text(completion) for completion in completions]
    return [answer_value(text, _numbers(numbers)) for text, numbers in zip(texts, nums, strict=True)]


def _numbers(value):
    """Read an item of the column nums."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(listed, (list, tuple)):
        raise ValueError(f"column nums must hold a list of whole numbers in each row, got {shown(value)}")
    return [_whole("nums", item) for item in listed]


def _whole(column, value):
    """Read a whole number of a column, which may be a float in a data frame."""
    number = plain(value)
    if isinstance(number, bool) or not (isinstance(number, int) or (isinstance(number, float) and number.is_integer())):
        raise ValueError(f"column {column} must hold whole numbers in each row, got {shown(value)}")
    return int(number)


def answer_value(text: str, numbers: list[int]) -> Fraction | None:
    """Compute the expression in the last ``<answer>...</answer>`` of a text.

    It may use each of `numbers` as often as listed. The value is exact. It is None if there is no answer, the answer is
    not an expression of whole numbers with + - * / and brackets, exceeds ``MAX_LENGTH`` or ``MAX_DEPTH``, uses other
    numbers, or divides by zero.

    Examples:
        >>> answer_value("3/2 is 1.5, so <answer>3/2*7</answer>", [2, 3, 7])
        Fraction(21, 2)
    """
    end = text.rfind(_CLOSING)
    start = text.rfind(_OPENING, 0, max(end, 0))
    if start < 0:
        return None
    expression = text[start + len(_OPENING) : end].strip()
    if not _READABLE.fullmatch(expression):
        return None
    used = []
    value = expression_value(expression, used)
    return value if Counter(used) <= Counter(numbers) else None


def expression_value(expression: str, used: list) -> Fraction | None:
    """Compute an expression of numbers with + - * / and brackets, and append its numbers to `used`.

    The value is exact. It is None if the text is not such an expression, or exceeds ``MAX_LENGTH`` or ``MAX_DEPTH``.
    """
    if len(expression) > MAX_LENGTH:
        return None
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, used, MAX_DEPTH)
    except (_Unreadable, SyntaxError, ZeroDivisionError):
        return None


class _Unreadable(Exception):
    """The tree is not an expression of numbers and the four operations, or is too deep."""


def _value(node: ast.expr, used: list, depth: int) -> Fraction:
    """Compute a tree of at most `depth` operations inside one another, and append its numbers to `used`."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        used.append(node.value)
        return Fraction(str(node.value))
    if depth and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used, depth - 1)
    if not depth or not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATIONS:
        raise _Unreadable
    left, right = (_value(side, used, depth - 1) for side in (node.left, node.right))
    return _OPERATIONS[type(node.op)](left, right)
