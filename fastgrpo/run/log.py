"""The log of a run: the terminal, metrics.jsonl, samples.jsonl, warnings.jsonl, completions as parquet, and trackers.

Rank 0 writes. Other ranks have a `FollowedLog`, which keeps the metrics but writes nothing.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.data.prompts import transcript
from fastgrpo.ranks import ALONE, Ranks, together
from fastgrpo.run.folder import LOCK, RunFolder, contents, made_in, remove, see
from fastgrpo.run.metrics import SAMPLE_COLUMNS, entry, finite, metrics_of, reduced
from fastgrpo.run.resume import open_run
from fastgrpo.run.terminal import Terminal
from fastgrpo.run.trackers import TRACKERS, named


class RunLog:
    """The log of a run, which owns the run folder.

    The constructor claims the folder (see `open_run`), and writes config.json of a new run. As a context manager, it
    closes the files and releases the folder.
    """

    def __init__(self, config: TrainingConfig, inputs: Mapping[str, Path] | None = None) -> None:
        self.started = time.perf_counter()
        self.config, self.terminal = config, Terminal(bars=not config.disable_tqdm, quiet=config.quiet)
        self.folder, self.checkpoint = open_run(config, self.say, inputs)  # the checkpoint to resume from, or None
        self.dir = self.folder.path
        self._files, self._trackers = {}, []
        with contextlib.ExitStack() as opened:  # after a failure, close what was opened
            opened.callback(self.folder.close)
            if self.checkpoint is None:
                opened.callback(self.folder.empty)  # so that the command can be repeated
                self._write_config()
            for name in _LINES:
                # A lone surrogate becomes an escape of JSON: UTF-8 cannot encode it.
                path = self.folder.claim(f"{name}.jsonl")
                self._files[name] = opened.enter_context(open(path, "a", encoding="utf-8", errors="backslashreplace"))
            for name in config.report_to:
                if name != "none":
                    self._trackers.append(TRACKERS[name](config, self.folder, self.checkpoint))
                    opened.callback(self._trackers[-1].close)
            opened.pop_all()
        self._pending = []  # (step, metrics) of steps without a line in metrics.jsonl
        self.latest = {}  # the last (step, value) of every metric, also under TRL's name
        self.history = []  # the logged entries, see `metrics.entry`
        self._completions_step = 0  # the last step whose completions were written

    def __enter__(self) -> Self:
        self.folder.check()
        return self

    def __exit__(self, kind, error, trace):
        try:
            # After an error, pending steps would be lost. After a signal, the checkpoint has them.
            if error is not None:
                self.flush()
        finally:
            self.close(failed=error is not None)

    def _write_config(self):
        resolved = {"command": self.config.command, **dataclasses.asdict(self.config), "output_dir": str(self.dir)}
        self.folder.claim("config.json").write_text(json.dumps(resolved, indent=2) + "\n")

    def say(self, text: str) -> None:
        """Print a text above the progress bar."""
        self.terminal.say(text)

    def step(self, step: int, values: dict[str, float], last: bool = False) -> dict[str, Any] | None:
        """Add the metrics of one step. Every logging_steps steps, write their means to metrics.jsonl."""
        self._pending.append((step, values))
        return self.flush() if self.config.logs(step) or last else None

    def discard(self) -> None:
        """Release the folder. If the run is new, delete what it wrote there, and the folder if nothing is left."""
        new = self.checkpoint is None and self.folder.held
        if new:
            self.folder.empty()
        self.close()
        if new and not contents(self.dir):
            remove(self.dir)

    def flush(self) -> dict[str, Any] | None:
        """Write one line for the pending steps."""
        if not self._pending:
            return None
        rows = [values for _, values in self._pending]
        names = dict.fromkeys(name for values in rows for name in values)
        line = {name: reduced(name, [values[name] for values in rows if name in values]) for name in names}
        step, self._pending = self._pending[-1][0], []
        return self.write(step, line)

    def write(self, step: int, values: dict[str, float]) -> dict[str, Any]:
        """Write one line of metrics.jsonl, and send it to the trackers."""
        self._append("metrics", [{"step": step, **values}])
        for tracker in self._trackers:
            tracker.log(step, named(step, values))
        return self._note(step, values)

    def _note(self, step, values):
        """Add a line to the history, and return its entry."""
        made = entry(step, values)
        measured = {name: value for name, value in (made | values).items() if value is not None and name != "step"}
        self.latest |= {name: (step, value) for name, value in measured.items()}
        self.history.append(made)
        return made

    def samples(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write lines of samples.jsonl."""
        self._append("samples", rows)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]], shown: int | None) -> None:
        """Print completions, send them to trackers, and write them to completions/completions_STEP.parquet."""
        columns = columns_of(rows)
        self.terminal.columns(cells(columns, shown))
        write_parquet(self.folder.claim(FOLDER), step, columns)
        self._completions_step = step
        for tracker in self._trackers:
            tracker.completions(step, columns)

    def warn(self, step: int, text: str) -> None:
        """Print a warning about a step, and write it to warnings.jsonl, unless the run has ended."""
        self.say(f"step {step}: {text}")
        if self.folder.held:
            self._append("warnings", [{"step": step, "text": text}])

    def _append(self, name, rows):
        self._files[name].writelines(_line(row) for row in rows)
        self._files[name].flush()

    def close(self, failed: bool = False) -> None:
        """Close the progress bar and the files, and release the folder."""
        self.terminal.close_bar()
        with contextlib.ExitStack() as closing:  # a failure does not keep the others open
            for part in (self.folder, *self._files.values()):
                closing.callback(part.close)
            for tracker in self._trackers:
                closing.callback(tracker.close, failed)
            self._trackers = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the log for a checkpoint."""
        return {
            "wall_seconds": time.perf_counter() - self.started,
            "pending": self._pending,
            "completions_step": self._completions_step,
            **{f"{name}_bytes": os.fstat(file.fileno()).st_size for name, file in self._files.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the log of a checkpoint: truncate later lines, and write the new settings."""
        self._write_config()
        self._completions_step = state["completions_step"]
        if FOLDER in made_in(self.dir):
            forget_after(self.dir / FOLDER, self._completions_step)
        self.started = time.perf_counter() - state["wall_seconds"]
        self._go_back(state)
        for name, file in self._files.items():
            size = state[f"{name}_bytes"]
            if os.fstat(file.fileno()).st_size < size:
                self.say(f"warning: {file.name} has lost lines since the checkpoint was written")
            else:
                file.truncate(size)

    def _go_back(self, state):
        """Restore the metrics of a checkpoint."""
        self._pending = state["pending"]
        self.history.clear()
        path = self.dir / "metrics.jsonl"
        logged = path.read_bytes()[: state["metrics_bytes"]] if path.is_file() else b""
        for row in filter(None, map(metrics_of, logged.split(b"\n"))):
            self._note(row.pop("step"), row)


def _line(row):
    """Format a row as one line of JSON. NaN and infinity become null."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(finite(row), ensure_ascii=False) + "\n"


_LINES = ("metrics", "samples", "warnings")  # the names of the .jsonl files
FOLDER = "completions"
_NAME = re.compile(r"completions_(\d+)\.(parquet|part)")


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """Turn lines of samples.jsonl into columns."""
    functions = dict.fromkeys(name for row in rows for name in row["rewards"])
    extras = dict.fromkeys(name for row in rows for name in row if name not in SAMPLE_COLUMNS)
    columns = {name: [row[name] for row in rows] for name in ("step", "prompt", "completion", "advantage")}
    for kind, names, values in (
        ("reward", functions, [row["rewards"] for row in rows]),
        ("logged", extras, rows),
    ):
        for name in names:
            title = name
            while title in columns:
                title += f" ({kind})"
            columns[title] = [row.get(name) for row in values]
    return columns | {"advantage": columns.pop("advantage")}  # the last column


def write_parquet(folder: Path, step: int, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write completions/completions_STEP.parquet atomically. A column that parquet cannot hold becomes JSON."""
    import pyarrow
    from pyarrow import parquet

    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pyarrow.array(values)
            parquet.write_table(pyarrow.table({name: arrays[name]}), io.BytesIO())  # parquet refuses {}, for example
        except (pyarrow.ArrowException, UnicodeEncodeError, OverflowError):
            arrays[name] = pyarrow.array([json.dumps(value) for value in values])  # JSON escapes lone surrogates
    folder.mkdir(exist_ok=True)
    path = folder / f"completions_{step:05d}.parquet"
    part = path.with_suffix(".part")
    parquet.write_table(pyarrow.table(arrays), part)
    return part.replace(path)


def forget_after(folder: Path, step: int) -> None:
    """Delete the files of steps that a resumed run repeats, and unfinished files."""
    for path in folder.glob("completions_*"):
        match = _NAME.fullmatch(path.name)
        if match and (match[2] == "part" or int(match[1]) > step):
            path.unlink()


def cells(columns: Mapping[str, Sequence[Any]], most: int | None) -> list[list[str]]:
    """Format completions as table cells for the terminal."""
    shown = {name: values[:most] for name, values in columns.items() if name != "step"}
    return [list(shown), *([_cell(value) for value in row] for row in zip(*shown.values(), strict=True))]


def _cell(value):
    if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
        return transcript(value)
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)


class FollowedFolder:
    """The run folder on ranks other than 0. All ranks close their logs together, so `held` equals that of rank 0."""

    check = RunFolder.check

    def __init__(self, path: Path) -> None:
        self.path, self.held = path, True

    def claim(self, name: str) -> Path:
        """Return the path of a file that rank 0 writes."""
        return self.path / name

    def close(self) -> None:
        """Mark the folder as released."""
        self.held = False


class FollowedLog(RunLog):
    """A log with the metrics of rank 0 that writes nothing."""

    def __init__(self, config: TrainingConfig, path: Path, checkpoint: Path | None) -> None:
        self.started, self.config, self.terminal = time.perf_counter(), config, Terminal(silent=True)
        self.folder, self.dir, self.checkpoint = FollowedFolder(path), path, checkpoint
        self._files, self._trackers, self._pending, self.latest, self.history = {}, [], [], {}, []

    discard, load_state_dict = RunLog.close, RunLog._go_back

    def _append(self, name, rows):
        """Write no lines: rank 0 does."""


def open_log(config: TrainingConfig, inputs: Mapping[str, Path] | None = None, ranks: Ranks = ALONE) -> RunLog:
    """Claim the folder of a run on rank 0, and open the logs of all ranks."""
    log = RunLog(config, inputs) if ranks.lead else None
    told = None if log is None else (log.dir, log.checkpoint, (log.dir / LOCK).read_text())
    *where, owner = ranks.from_lead(told, "the folder of the run")
    log = FollowedLog(config, *where) if log is None else log
    try:
        together(ranks, lambda: see(log.dir, owner), "the folder of the run")
    except BaseException:
        log.discard()
        raise
    return log
