"""Reads the folder of a run as one record. Missing files and incomplete lines are allowed.

Only metrics.jsonl is required. config.json, summary.json, warnings.jsonl and model cards are optional.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgrpo.run.checkpoint import checkpoints
from fastgrpo.run.curves import read_metrics
from fastgrpo.run.folder import SWEEP_TABLE, made_in

NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")  # in the name of a sweep's run, such as 1e-4
VERSIONS = re.compile(r"^## Versions\n+((?:- .+\n?)+)", re.MULTILINE)  # in the model card of a checkpoint


@dataclass(frozen=True)
class Run:
    """The content of a run folder."""

    folder: Path
    name: str  # unique on the page
    config: dict[str, Any]  # the settings of config.json; empty if unreadable
    series: dict[str, tuple[list[int], list[float]]]  # steps and values by metric, in the order of metrics.jsonl
    summary: dict[str, Any]  # the content of summary.json; empty for an unfinished run
    warnings: list[dict[str, Any]]  # step and text of each
    versions: list[str]  # packages, such as "torch 2.9"; empty without a checkpoint

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl, or 0."""
        return max((steps[-1] for steps, _ in self.series.values()), default=0)

    @property
    def finished(self) -> bool:
        """Whether the run has finished. The summary of an earlier end does not count after a resume."""
        return self.summary.get("steps") == self.last_step


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders of the command line."""
    found = [run for folder in folders for run in _runs_of(folder)]
    return list({run.resolve(): run for run in found}.values())


def _runs_of(folder):
    if (folder / "metrics.jsonl").is_file():
        return [folder]
    inside = [path.parent for path in folder.glob("*/metrics.jsonl")] if folder.is_dir() else []
    inside.sort(key=lambda run: [float(part) if i % 2 else part for i, part in enumerate(NUMBER.split(run.name))])
    if inside and SWEEP_TABLE in made_in(folder):
        return inside
    told = f"{folder} is not the folder of a run: it has no metrics.jsonl"
    if inside:
        raise ValueError(f"{told}, but it contains runs; name the runs to show, such as {inside[0]}")
    raise ValueError(f"{told}; name a folder such as runs/TASK-1")


def names_of(folders: Sequence[Path]) -> list[str]:
    """Name each run by its folder, with as many parent folders as needed to be unique."""
    paths, depths = [folder.resolve() for folder in folders], [1] * len(folders)
    while True:
        names = ["/".join(path.parts[-depth:]) for path, depth in zip(paths, depths, strict=True)]
        equal = [names.count(name) > 1 for name in names]
        if not any(equal):
            return names
        depths = [depth + more for depth, more in zip(depths, equal, strict=True)]


def read_run(folder: Path, name: str, say: Callable[[str], None] = print) -> Run:
    """Read the folder of a run."""
    warnings = [
        {"step": row["step"], "text": row["text"]}
        for row in json_lines(folder / "warnings.jsonl")
        if isinstance(row.get("step"), int) and isinstance(row.get("text"), str)
    ]
    return Run(
        folder=folder,
        name=name,
        config=_object(folder / "config.json"),
        series=read_metrics(folder, say),
        summary=_object(folder / "summary.json"),
        warnings=warnings,
        versions=_versions(folder),
    )


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file. Skip other lines."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (errors of later reads are not caught here)
    except OSError:
        return
    with file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def _object(path):
    """Read a file with one JSON object; empty if unreadable, for example while it is written."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _versions(folder):
    """Read the versions in the model card of the newest checkpoint."""
    for checkpoint in reversed(checkpoints(folder).values()):
        try:
            card = (checkpoint / "README.md").read_text(errors="replace")
        except OSError:
            continue
        if found := VERSIONS.search(card):
            return [line.removeprefix("- ").replace(": ", " ") for line in found[1].splitlines()]
    return []


def finite(value: Any) -> float | int | None:
    """Return a JSON value if it is a finite number, else None."""
    try:
        return value if type(value) in (int, float) and math.isfinite(value) else None
    except OverflowError:
        return None
