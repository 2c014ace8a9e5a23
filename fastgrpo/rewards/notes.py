"""What a reward function logs besides its rewards: numbers for metrics.jsonl, and columns for samples.jsonl."""

import math
from collections import defaultdict
from collections.abc import Sequence
from numbers import Real
from typing import Any

from fastgrpo.rewards.values import json_values, length, listed, number, plain, shown
from fastgrpo.run.metrics import is_known

# The columns that every line of samples.jsonl has, in their order.
SAMPLE_COLUMNS = (
    "step", "group", "prompt", "completion", "rewards", "advantage", "finish_reason", "tokens", "clipped",
)  # fmt: skip

# The functions that a reward function gets to log by.
LOGS = ("log_metric", "log_extra")


class Notes:
    """What one reward function logs during one call.

    Its attributes are `metrics`, the values by metric, and `columns`, the S values of each column by its name. What a
    function logs after the call, as from a thread of its own, is lost.

    Args:
        count: S, the number of completions.
    """

    def __init__(self, count: int):
        self.count = count
        self.metrics, self.columns = defaultdict(list), {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number. The mean of all numbers of a step that have its name goes to metrics.jsonl under it.

        Args:
            name: The name.
            value: A number of Python, NumPy or torch. One that is not finite, or lies outside of the range of rewards,
                makes the mean NaN, which metrics.jsonl shows as null.

        Raises:
            ValueError: The name is no text or that of a metric that every run has, or the value is no number.
        """
        _check_name("log_metric", name)
        if is_known(name):
            raise ValueError(f"log_metric({name!r}, ...): a run logs a metric of this name itself; choose another name")
        if not isinstance(plain(value), Real):
            raise ValueError(f"log_metric({name!r}, ...) takes a number, got {shown(value)}")
        read = number(value)
        self.metrics[name].append(math.nan if read is None else read)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column of samples.jsonl. Logged once more in the same call, it has the later values.

        Args:
            column: The name of the column.
            values: One value a completion, of what JSON can hold. NaN and infinity become null.

        Raises:
            ValueError: The name is no text or belongs to a column that every sample has, there is not one value a
                completion, or JSON cannot hold a value.
        """
        _check_name("log_extra", column)
        if column in SAMPLE_COLUMNS:
            raise ValueError(f"log_extra({column!r}, ...): every sample has such a column; choose another name")
        items = listed(values, self.count)
        if items is None:
            raise ValueError(f"log_extra({column!r}, ...) takes a list, got {shown(values)}")
        if len(items) != self.count:
            got = length(values, items, self.count)
            raise ValueError(f"log_extra({column!r}, ...) takes one value a completion: {self.count}, got {got}")
        try:
            self.columns[column] = json_values(items)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"log_extra({column!r}, ...) takes what JSON can hold: {error}") from None

    def take(self, other: "Notes", start: int) -> None:
        """Take over what was logged for some of the completions.

        Args:
            other: What one call logged.
            start: The index of its first completion. The others have None in a column that it alone logged.
        """
        for name, values in other.metrics.items():
            self.metrics[name] += values
        for column, values in other.columns.items():
            self.columns.setdefault(column, [None] * self.count)[start : start + other.count] = values


def _check_name(function, name):
    if not isinstance(name, str) or not name:
        raise ValueError(f"{function}({shown(name)}, ...): a name is a text that is not empty")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{function}({name!r}, ...): the name cannot be written as UTF-8: {error.reason}") from None
