"""Rows of data that know where each came from, so that whatever is wrong with a row is told by its file and line."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from os import PathLike
from typing import Any, Self, TypeVar

from torch.utils.data import IterableDataset

Result = TypeVar("Result")


class Rows(Sequence):
    """Rows, which are neither copied nor changed, and the place of each.

    Args:
        rows: What has a length and gives a row, a dict, for each index.
        where: A function that says where the row of an index came from, such as train.jsonl:17.
    """

    def __init__(self, rows: Sequence[dict], where: Callable[[int], str]):
        self.rows, self.where = rows, where

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __iter__(self):  # not by index, one after the other, which is slow in a datasets.Dataset
        return (row for _, row in zip(range(len(self)), self.rows, strict=False))

    def each(self, function: Callable[[dict], Result]) -> Iterator[Result]:
        """Apply a function to every row. Faults of rows are told here, and nowhere else.

        Args:
            function: A function of one row, which raises ValueError where the row cannot be used.

        Yields:
            What the function returned for each row.

        Raises:
            ValueError: The function raised it; the place of the row is put before what it said.
        """
        for index, row in enumerate(self):
            try:
                result = function(row)
            except ValueError as error:
                raise ValueError(f"{self.where(index)}: {error}") from error.__cause__
            yield result

    def map(self, function: Callable[[dict], dict]) -> Self:
        """Make new rows of these.

        Args:
            function: A function that returns a new row for a row, and raises ValueError where it cannot.

        Returns:
            The new rows, whose places are those of the old ones.

        Raises:
            ValueError: The function raised it; the place of the row is put before what it said.
        """
        return type(self)(list(self.each(function)), self.where)

    def head(self, count: int | None) -> Self:
        """Return the first rows.

        Args:
            count: How many; None for all.

        Returns:
            The rows themselves, or as many of them as were asked for.
        """
        if count is None or count >= len(self):
            return self
        return type(self)([self.rows[index] for index in range(count)], self.where)


def joined(parts: Sequence[Rows]) -> Rows:
    """Put rows one after the other."""
    places = [(part, index) for part in parts for index in range(len(part))]
    return Rows([row for part in parts for row in part], lambda n: places[n][0].where(places[n][1]))


def as_rows(data: Any, name: str, limit: int | None = None, setting: str = "a list in its place") -> Rows:
    """Return the `Rows` of a data set that a person gave from Python, or refuse it by name."""
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
        remedy = f"it may have no end, so pass {setting}"
    elif hasattr(data, "iloc") and hasattr(data, "columns"):  # as pandas.DataFrame, which is not imported here
        return _numbered(_plain(data.to_dict("records")), name)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "iloc"):
        return _numbered(data, name)
    else:
        remedy = (
            "pass rows (a list of dicts, a datasets.Dataset, a pandas.DataFrame), or for training a Source, which has "
            "rows, take, observe, metrics, state_dict and load_state_dict"
        )
    raise ValueError(f"{name} is of type {type(data).__name__}; {remedy}")


def _numbered(rows, name):
    """Return rows whose places are a name and their index."""
    return Rows(rows, lambda index: f"{name} row {index}")


def _plain(value):
    """Turn the arrays and numbers of NumPy in nested values into Python's own lists and numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
