"""The completions of a logged step as a table: for parquet files in TRL's form, the terminal, and trackers."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "completions"
_NAME = re.compile(r"completions_(\d+)\.(parquet|part)")
_TOKENS = {"token_ends", "logps", "ratios", "clipped_tokens"}  # numbers of tokens, which a table of texts leaves out
_FIRST = ("step", "prompt", "completion")
_OTHERS = {"group", "finish_reason", "tokens", "clipped", "rewards", "advantage"}


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """Turn lines of samples.jsonl into columns."""
    functions = dict.fromkeys(name for row in rows for name in row["rewards"])
    extras = dict.fromkeys(name for row in rows for name in row if name not in {*_FIRST, *_OTHERS, *_TOKENS})
    columns = {name: [row[name] for row in rows] for name in (*_FIRST, "advantage")}
    for kind, names, values in (
        ("reward", functions, [row["rewards"] for row in rows]),
        ("logged", extras, rows),
    ):
        for name in names:
            title = name
            while title in columns:
                title += f" ({kind})"
            columns[title] = [row.get(name) for row in values]
    return columns | {"advantage": columns.pop("advantage")}  # it comes last


def write_parquet(folder: Path, step: int, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write completions/completions_STEP.parquet, whole or not at all."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({name: _array(pyarrow, values) for name, values in columns.items()})
    folder.mkdir(exist_ok=True)
    path = folder / f"completions_{step:05d}.parquet"
    part = path.with_suffix(".part")
    parquet.write_table(table, part)
    return part.replace(path)


def _array(pyarrow, values):
    try:
        array = pyarrow.array(values)
        if not _has_empty_struct(pyarrow, array.type):
            return array
    except (pyarrow.ArrowException, UnicodeEncodeError, OverflowError):
        pass
    return pyarrow.array([json.dumps(value) for value in values])  # JSON escapes what UTF-8 cannot encode


def _has_empty_struct(pyarrow, kind):
    """Whether a type holds {}, which parquet cannot."""
    if pyarrow.types.is_list(kind):
        return _has_empty_struct(pyarrow, kind.value_type)
    if not pyarrow.types.is_struct(kind):
        return False
    return not kind.num_fields or any(_has_empty_struct(pyarrow, kind.field(i).type) for i in range(kind.num_fields))


def forget_after(folder: Path, step: int) -> None:
    """Delete the files of steps that a resumed run makes again, and those that a crash left unfinished."""
    for path in folder.glob("completions_*"):
        match = _NAME.fullmatch(path.name)
        if match and (match[2] == "part" or int(match[1]) > step):
            path.unlink()


def cells(columns: Mapping[str, Sequence[Any]], most: int | None) -> list[list[str]]:
    """Lay out completions for the terminal."""
    shown = {name: values[:most] for name, values in columns.items() if name != "step"}
    return [list(shown), *([_cell(value) for value in row] for row in zip(*shown.values(), strict=True))]


def _cell(value):
    if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
        return "\n".join(f"{turn['role']}: {turn.get('content', '')}" for turn in value)
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)
