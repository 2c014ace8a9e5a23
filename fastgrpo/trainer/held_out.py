"""The held-out rows of a trainer: one data set, or several by name, each with metrics of its own."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastgrpo.data.rows import Rows, as_rows
from fastgrpo.evaluation.heldout import Evaluation


def read_held_out(data: Any, count: int | None) -> dict[str, Rows]:
    """Read held-out rows.

    Args:
        data: Rows, or a dict of them by the name of the data set; None for no rows.
        count: The most rows of a data set; None for all.

    Returns:
        Rows by the name of their data set, which is empty where there is one alone.

    Raises:
        ValueError: A data set is none, has no rows, or has a name that no metric can have.
    """
    if data is None:
        return {}
    named = data if isinstance(data, Mapping) else {"": data}
    read = {}
    for name, rows in named.items():
        if not isinstance(name, str) or "/" in name or (isinstance(data, Mapping) and not name):
            raise ValueError(f"eval_dataset: {name!r} cannot be the name of a data set; take a text without /")
        where = f"eval_dataset[{name!r}]" if name else "eval_dataset"
        read[name] = as_rows(rows, where, count, "max_eval_samples").head(count)
    return read


def prefixes(names: Iterable[str], prefix: str) -> list[str]:
    """Return what the metrics of each data set begin with, as transformers does.

    Args:
        names: The names of the data sets.
        prefix: What the metrics of one data set alone begin with.

    Returns:
        PREFIX_NAME for each name, and the prefix itself for an empty one.
    """
    return [f"{prefix}_{name}" if name else prefix for name in names]


def renamed(result: Evaluation, prefix: str) -> Evaluation:
    """Put another prefix in the place of eval/.

    Args:
        result: The results of an evaluation.
        prefix: The prefix, without a slash.

    Returns:
        The results with new names of their metrics.
    """
    if prefix == "eval":
        return result
    values, intervals = (
        {f"{prefix}/{name.removeprefix('eval/')}": value for name, value in of.items()}
        for of in (result.values, result.intervals)
    )
    return dataclasses.replace(result, values=values, intervals=intervals)


def all_rows(held_out: Mapping[str, Sequence[dict]]) -> list[dict]:
    """List the rows of all data sets.

    Args:
        held_out: Rows by the name of their data set.

    Returns:
        One row after the other.
    """
    return [row for rows in held_out.values() for row in rows]
