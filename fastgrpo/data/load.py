"""Loads a data set by its name: a .jsonl file, a folder of such files, or a data set of the hub."""

import json
from collections.abc import Sequence
from pathlib import Path

from fastgrpo.data.rows import Rows


def load_rows(name: str, config: str | None = None, split: str = "train", columns: Sequence[str] = ()) -> Rows | None:
    """Read the rows of a .jsonl file, of SPLIT.jsonl in a folder, or of a hub data set.

    A file holds the split train. For another split, SPLIT.jsonl beside the file is read.

    Args:
        name: The file, the folder or the hub id.
        config: The configuration name of a hub data set.
        split: The split.
        columns: Names that every row must have.

    Returns:
        The rows, which know their file and line, or None where there is no such split.

    Raises:
        ValueError: There is no such data set, it is not a file, it has no rows, or a row is not a JSON object with
            these columns; file and line are named.
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
    if not path.is_file():  # to open a pipe would wait for its writer
        kind = "folder" if path.is_dir() else "pipe or a device"
        raise ValueError(f"{path} is a {kind}; write the rows to a file, one JSON object a line")
    rows = read_jsonl(path, columns)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _load_from_hub(name, config, split, columns):
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        reason = " ".join(str(error).split())[:300]
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
    """Read a file of one JSON object a line; empty lines are passed over."""
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
            except (ValueError, RecursionError) as error:  # Python limits the digits of a number and the depth of lists
                raise ValueError(f"{path}:{number}: not JSON that can be read: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a row must be a JSON object, got {type(row).__name__}")
            for column in columns:
                if column not in row:
                    raise ValueError(f"{path}:{number}: the row has no column {column!r}, only {', '.join(row)}")
            rows.append(row)
            numbers.append(number)
    return Rows(rows, lambda index: f"{path}:{numbers[index]}")
