"""The held-out rows of a trainer: one data set, or several by name, each with metrics of its own."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastgrpo.data.rows import Rows, as_rows
from fastgrpo.evaluation.heldout import Evaluation


def read_held_out(data: Any, count: int | None) -> dict[str, Rows]:
    """Read held-out rows."""
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
    """Return what the metrics of each data set begin with, as transformers does."""
    return [f"{prefix}_{name}" if name else prefix for name in names]


def renamed(result: Evaluation, prefix: str) -> Evaluation:
    """Put another prefix in the place of eval/."""
    if prefix == "eval":
        return result
    values, intervals = (
        {f"{prefix}/{name.removeprefix('eval/')}": value for name, value in of.items()}
        for of in (result.values, result.intervals)
    )
    return dataclasses.replace(result, values=values, intervals=intervals)


def all_rows(held_out: Mapping[str, Sequence[dict]]) -> list[dict]:
    """List the rows of all data sets."""
    return [row for rows in held_out.values() for row in rows]
