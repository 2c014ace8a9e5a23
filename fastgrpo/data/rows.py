"""Data rows with their locations, so that errors name file and line; and loading them by name."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar

from torch.utils.data import IterableDataset

Result = TypeVar("Result")


class Rows(Sequence):
    """Rows, neither copied nor changed, and the location of each.

    Args:
        rows: A sequence of dicts.
        where: Maps an index to the location of its row, such as train.jsonl:17.
    """

    def __init__(self, rows: Sequence[dict], where: Callable[[int], str]):
        self.rows, self.where = rows, where

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __iter__(self):  # indexing a datasets.Dataset row by row is slow
        return (row for _, row in zip(range(len(self)), self.rows, strict=False))

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns that some row has, without the prompt."""
        names = getattr(self.rows, "column_names", None)  # of a datasets.Dataset, whose rows all have the same
        return [name for name in dict.fromkeys(names or (name for row in self for name in row)) if name != "prompt"]

    def each(self, function: Callable[[dict], Result]) -> Iterator[Result]:
        """Apply a function to every row, and name the row in its errors.

        Args:
            function: A function of one row. It raises ValueError for an invalid row.

        Yields:
            The results, in order.

        Raises:
            ValueError: The function raised it. The message is prefixed with the location of the row.
        """
        for index, row in enumerate(self):
            try:
                result = function(row)
            except ValueError as error:
                raise ValueError(f"{self.where(index)}: {error}") from error.__cause__
            yield result

    def map(self, function: Callable[[dict], dict]) -> Self:
        """Return new rows with the same locations. Errors of `function` are reported as in `each`."""
        return type(self)(list(self.each(function)), self.where)

    def head(self, count: int | None) -> Self:
        """Return the first `count` rows, or all if None."""
        if count is None or count >= len(self):
            return self
        return type(self)([self.rows[index] for index in range(count)], self.where)


def joined(parts: Sequence[Rows]) -> Rows:
    """Concatenate rows."""
    places = [(part, index) for part in parts for index in range(len(part))]
    return Rows([row for part in parts for row in part], lambda n: places[n][0].where(places[n][1]))


def as_rows(data: Any, name: str, limit: int | None = None, setting: str = "a list instead") -> Rows:
    """Convert a data set given in Python to `Rows`. Raise a ValueError that names it if it cannot be read."""
    if isinstance(data, Rows):
        return data
    if isinstance(data, (str, PathLike)):
        remedy = "read the rows first: fastgrpo.data.load_rows(name), or datasets.load_dataset(name, split='train')"
    elif isinstance(data, Mapping):  # a DatasetDict too
        split = "" if "prompt" in data else f"one split, such as data[{next(iter(data), 'train')!r}], or "
        remedy = f"pass {split}a list of dicts, one for each row"
    elif hasattr(data, "__next__"):
        remedy = "it can be read only once, so pass list(...) of it"
    elif isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__len__")):
        if limit is not None:
            return _numbered(list(islice(data, limit)), name)
        remedy = f"it may be infinite, so pass {setting}"
    elif hasattr(data, "iloc") and hasattr(data, "columns"):  # a pandas.DataFrame, without importing pandas
        return _numbered(_plain(data.astype(object).where(data.notna(), None).to_dict("records")), name)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "iloc"):
        return _numbered(data, name)
    else:
        remedy = (
            "pass rows (a list of dicts, a datasets.Dataset, a pandas.DataFrame), or for training a Source, which has "
            "rows, take, observe, metrics, state_dict and load_state_dict"
        )
    raise ValueError(f"{name} is of type {type(data).__name__}; {remedy}")


def _numbered(rows, name):
    """Return rows with a name and their index as locations."""
    return Rows(rows, lambda index: f"{name} row {index}")


def _plain(value):
    """Convert NumPy arrays and scalars in nested values to Python lists and numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def load_rows(name: str, config: str | None = None, split: str = "train", columns: Sequence[str] = ()) -> Rows | None:
    """Read the rows of a .jsonl file, of SPLIT.jsonl in a folder, or of a hub data set.

    A file holds the split train. For another split, SPLIT.jsonl beside the file is read.

    Args:
        name: The file, the folder or the hub id.
        config: The configuration name of a hub data set.
        split: The split.
        columns: Names that every row must have.

    Returns:
        The rows with their locations, or None if there is no such split.

    Raises:
        ValueError: There is no such data set, it is not a file, it has no rows, or a row is not a JSON object with
            these columns. The message names file and line.
    """
    path = Path(name)
    if path.is_dir():
        path = path / f"{split}.jsonl"
    elif path.suffix == ".jsonl":
        if not path.exists():
            raise ValueError(f"no such file: {path}")
        if split != "train":
            path = path.with_name(f"{split}.jsonl")
    elif path.exists():
        raise ValueError(f"{path} is not a .jsonl file: write one JSON object a line, with a `prompt` column")
    else:
        return _load_from_hub(name, config, split, columns)
    if not path.exists():
        return None
    if not path.is_file():  # opening a pipe would block
        kind = "folder" if path.is_dir() else "pipe or a device"
        raise ValueError(f"{path} is a {kind}; write the rows to a file, one JSON object a line")
    rows = read_jsonl(path, columns)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _load_from_hub(name, config, split, columns):
    import datasets

    failures = ValueError, FileNotFoundError, ConnectionError, RuntimeError, datasets.exceptions.DatasetsError
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except failures as error:
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())[:300]  # the cause names wrong columns
        if reason.startswith("Unknown split"):
            return None
        raise ValueError(
            f"data set {name!r} cannot be loaded ({reason}); name a hub id, a .jsonl file, or a folder with "
            f"{split}.jsonl"
        ) from error
    missing = [column for column in columns if column not in getattr(rows, "column_names", columns)]
    if missing:
        raise ValueError(f"data set {name!r} has no column {missing[0]!r}, only {', '.join(rows.column_names)}")
    return Rows(rows, lambda index: f"{name} {split}, row {index}")


def read_jsonl(path: Path, columns: Sequence[str] = ()) -> Rows:
    """Read a file with one JSON object per line; empty lines are skipped."""
    rows, numbers = [], []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8: {error}") from None
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # Python limits the digits of a number and the nesting
                raise ValueError(f"{path}:{number}: invalid JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a row must be a JSON object, got {type(row).__name__}")
            for column in columns:
                if column not in row:
                    raise ValueError(f"{path}:{number}: the row has no column {column!r}, only {', '.join(row)}")
            rows.append(row)
            numbers.append(number)
    return Rows(rows, lambda index: f"{path}:{numbers[index]}")
