"""Reads and checks the results and logs of reward functions."""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from fastgrpo.config.sections import LARGEST_REWARD
from fastgrpo.rewards.guard import TIMED_OUT, Failure, listed, plain, shown
from fastgrpo.run.metrics import SAMPLE_COLUMNS, is_known

NUMBER = f"a finite number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"  # the values that `number` accepts, in words


def length(values: Any, items: Sequence, count: int) -> str:
    """Describe the length of a list that does not have one item per completion."""
    if len(items) <= count:
        return str(len(items))
    return str(len(values)) if hasattr(values, "__len__") else f"more than {count}"


def number(value: Any) -> float | None:
    """Read a number within the range of rewards. fp64 holds the squares of such numbers, so no deviation overflows."""
    value = plain(value)
    # The comparison is exact for integers of any size, and False for NaN.
    return float(value) if isinstance(value, Real) and abs(value) <= LARGEST_REWARD else None


def read_verdicts(result: Any, count: int) -> list[Any] | str:
    """Read the result of a reward function: a number, None, `TIMED_OUT` or a problem per completion.

    A problem is text or a `Failure`. One problem stands for all completions.
    """
    values = listed(result, count)
    if values is None:
        return f"returned {shown(result)}, not a list but of type {type(result).__name__}"
    if len(values) != count:
        return f"returned {length(result, values, count)} rewards for {count} completions"
    return [_verdict(i, value) for i, value in enumerate(values)]


def _verdict(i, value):
    if value is None or value is TIMED_OUT or isinstance(value, Failure):
        return value
    read = number(value)
    return f"returned {shown(plain(value))} for completion {i}, not {NUMBER} or None" if read is None else read


def json_values(values: Sequence[Any]) -> list:
    """Copy values through JSON."""
    text = json.dumps([plain(value) for value in values], ensure_ascii=False, default=json_number)
    text.encode()
    return json.loads(text, parse_constant=lambda constant: None)


def json_number(value: Any) -> Any:
    """Convert a value that JSON does not support, for `json.dumps`."""
    read = plain(value)
    if read is value:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return read


# The logging functions that a reward function gets.
LOGS = ("log_metric", "log_extra", "log_steps")


class Logs:
    """The logs of one reward function during one call. Logs after the call are lost."""

    def __init__(self, count: int):
        self.count = count
        self.metrics = defaultdict(list)  # the values by metric
        self.columns = {}  # the values of the completions by column
        self.steps = None  # for each completion a tuple of (end, reward) pairs

    def log_metric(self, name: str, value: float) -> None:
        """Log a number. metrics.jsonl gets the mean of all numbers of a step with this name."""
        _check_name("log_metric", name)
        if is_known(name) or is_known(f"eval/{name}"):
            raise ValueError(f"log_metric({name!r}, ...): a run already has a metric of this name; choose another name")
        if not isinstance(plain(value), Real):
            raise ValueError(f"log_metric({name!r}, ...) takes a number, got {shown(value)}")
        read = number(value)
        self.metrics[name].append(math.nan if read is None else read)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column of samples.jsonl. Later values in the same call replace earlier ones."""
        _check_name("log_extra", column)
        if column in SAMPLE_COLUMNS:
            raise ValueError(f"log_extra({column!r}, ...): every sample already has this column; choose another name")
        items = listed(values, self.count)
        if items is None:
            raise ValueError(f"log_extra({column!r}, ...) takes a list, got {shown(values)}")
        if len(items) != self.count:
            got = length(values, items, self.count)
            raise ValueError(f"log_extra({column!r}, ...) takes one value per completion: {self.count}, got {got}")
        try:
            self.columns[column] = json_values(items)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"log_extra({column!r}, ...) takes values that JSON supports: {error}") from None

    def log_steps(self, ends: Sequence[Sequence[int] | None], rewards: Sequence[Sequence[float] | None]) -> None:
        """Log the rewards of the steps of each completion, for --process_rewards token."""
        both = []
        for name, values in (("ends", ends), ("rewards", rewards)):
            items = listed(values, self.count)
            if items is None or len(items) != self.count:
                got = shown(values) if items is None else length(values, items, self.count)
                raise ValueError(
                    f"log_steps takes a list of {self.count} lists of {name}, one per completion; got {got}"
                )
            both.append(items)
        self.steps = [_steps(i, *of_one) for i, of_one in enumerate(zip(*both, strict=True))]

    def take(self, other: "Logs", start: int) -> None:
        """Add the logs of some of the completions."""
        for name, values in other.metrics.items():
            self.metrics[name] += values
        for column, values in other.columns.items():
            self.columns.setdefault(column, [None] * self.count)[start : start + other.count] = values
        if other.steps is not None:
            self.steps = [None] * self.count if self.steps is None else self.steps
            self.steps[start : start + other.count] = other.steps


def _steps(index, ends, rewards):
    """Return the (end, reward) pairs of one completion."""
    lists = [() if values is None else listed(values, sys.maxsize - 1) for values in (ends, rewards)]
    if None in lists or len(lists[0]) != len(lists[1]):
        raise ValueError(
            f"log_steps takes as many rewards as ends for each completion; completion {index} has ends {shown(ends)} "
            f"and rewards {shown(rewards)}"
        )
    read, before = [], 0
    for end, reward in zip(map(plain, lists[0]), lists[1], strict=True):
        if not isinstance(end, Integral) or isinstance(end, bool) or end <= before:
            raise ValueError(
                f"log_steps takes ends that rise from 1 (tokens up to the end of a step); completion {index} has "
                f"{shown(end)} after {before}"
            )
        if number(reward) is None:
            raise ValueError(f"log_steps takes rewards that are {NUMBER}; completion {index} has {shown(reward)}")
        before = int(end)
        read.append((before, number(reward)))
    return tuple(read)


def _check_name(function, name):
    if not isinstance(name, str) or not name:
        raise ValueError(f"{function}({shown(name)}, ...): the name must be text that is not empty")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{function}({name!r}, ...): the name cannot be written as UTF-8: {error.reason}") from None
