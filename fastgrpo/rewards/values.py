"""Reads what reward functions return and log: lists with one item a completion, numbers, and what JSON can hold."""

import itertools
import json
import math
import numbers
from collections.abc import Mapping, Sequence, Set
from typing import Any

from fastgrpo.config.objective import LARGEST_REWARD

NUMBER = f"a finite number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"  # what `number` accepts, in words


def listed(values: Any, count: int) -> list | None:
    """Read a list, or anything that gives its items in order: a tuple, a generator, a 1-d tensor, a pandas Series.

    What is not meant as a list but can be iterated over is refused: text, a dict, a set, a data frame.
    """
    no_list = isinstance(values, (str, bytes, bytearray, Mapping, Set)) or hasattr(values, "columns")
    if no_list or not hasattr(values, "__iter__"):
        return None
    return list(itertools.islice(values, count + 1))


def length(values: Any, items: Sequence, count: int) -> str:
    """Tell how long a list is that does not have one item a completion."""
    if len(items) <= count:
        return str(len(items))
    return str(len(values)) if hasattr(values, "__len__") else f"more than {count}"


def plain(value: Any) -> Any:
    """Convert a number of NumPy or torch to one of Python."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # several numbers
        return value


def number(value: Any) -> float | None:
    """Read a number within the range of rewards. fp64 holds the squares of such numbers, so no deviation overflows."""
    value = plain(value)
    # The comparison is exact for integers of any size, and False for NaN.
    return float(value) if isinstance(value, numbers.Real) and abs(value) <= LARGEST_REWARD else None


def read_verdicts(result: Any, count: int) -> list[float | str | None] | str:
    """Read what a reward function returned."""
    values = listed(result, count)
    if values is None:
        return f"returned {shown(result)}, not a list but of type {type(result).__name__}"
    if len(values) != count:
        return f"returned {length(result, values, count)} rewards for {count} completions"
    return [_verdict(i, value) for i, value in enumerate(values)]


def _verdict(i, value):
    reward = number(value)
    if reward is None and value is not None:
        return f"returned {shown(plain(value))} for completion {i}, not {NUMBER} or None"
    return reward


def json_values(values: Sequence[Any]) -> list:
    """Copy values as a line of JSON in UTF-8 gives them back."""
    text = json.dumps([plain(value) for value in values], ensure_ascii=False, default=json_number)
    text.encode()
    return json.loads(text, parse_int=_integer, parse_constant=lambda constant: None)


def json_number(value: Any) -> Any:
    """Convert what JSON does not know, for `json.dumps`."""
    read = plain(value)
    if read is value:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return read


def _integer(digits):
    """Read an integer of JSON; most readers take one beyond fp64 for infinity."""
    if math.isinf(float(digits)):
        raise ValueError(f"{digits[:20]}... is beyond the numbers that JSON's readers hold")
    return int(digits)


def shown(value: Any) -> str:
    """Show the beginning of a value on one line, for an error message."""
    try:
        return " ".join(repr(value).split())[:60]
    except Exception:  # such as that of an integer of more than 4,300 digits
        return f"a value of type {type(value).__name__}"
