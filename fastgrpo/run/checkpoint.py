"""Checkpoints: folders that are either complete or absent, written by a thread while training continues.

A checkpoint is first written to a temporary folder and synced. Then manifest.json, which lists every file with its
SHA-256, is written and synced, and the folder is renamed to checkpoint-STEP. So a process may be killed at any moment
and the last good checkpoint is still there. `snapshot.py` says what a checkpoint contains.
"""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, Self

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.run.folder import RunFolder

if TYPE_CHECKING:  # transformers takes seconds to import
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
NEEDED = (STATE, "optimizer.pt", "rng.pt")  # files that every checkpoint of a run has
CHUNK = 1 << 24  # bytes hashed at a time; chunks are large because each one has to acquire the interpreter's lock again


def save_model(
    path: Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    state_dict: "dict[str, torch.Tensor] | None" = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` reads: weights (safetensors), config and tokenizer.

    Args:
        path: The folder to write to. It is created where it does not exist.
        model: The model whose config, and by default whose weights, are written.
        tokenizer: The tokenizer that is written beside the model.
        state_dict: The weights to write by parameter name. None writes the model's own.
    """
    model.save_pretrained(path, state_dict=state_dict)
    tokenizer.save_pretrained(path)


def checkpoints(run_dir: str | Path) -> dict[int, Path]:
    """Find the checkpoints in the folder of a run, whether they are intact or not.

    Args:
        run_dir: The folder of a run.

    Returns:
        The path of each checkpoint by its step, in the order of the steps.
    """
    found = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(run_dir).iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match and path.is_dir()))


def step_of(path: str | Path) -> int:
    """Read the step from the name of a checkpoint.

    Args:
        path: A path that ends in checkpoint-STEP.

    Returns:
        The step.

    Raises:
        ValueError: The path does not end in checkpoint-STEP.
    """
    match = re.fullmatch(r"checkpoint-(\d+)", Path(path).name)
    if match is None:
        raise ValueError(f"{path} is not a checkpoint: the name of a checkpoint is checkpoint-STEP")
    return int(match[1])


def write_checkpoint(folder: RunFolder, step: int, write: Callable[[Path], None]) -> Path:
    """Write checkpoint-STEP into the folder of a run, either complete or not at all, whenever the process ends.

    Args:
        folder: The folder of the run.
        step: The step that names the checkpoint.
        write: Called with an empty folder, into which it writes the files of the checkpoint.

    Returns:
        The path of the checkpoint.

    Raises:
        OSError: The files could not be written. Nothing of the checkpoint is left in that case.
        ValueError: There is something under its name that no run made.
    """
    for leftover in folder.made():
        if leftover.name.startswith(".tmp-"):
            folder.remove(leftover.name)
    temporary = folder.claim(f".tmp-checkpoint-{step}")
    temporary.mkdir()
    try:
        write(temporary)
        files = [file for file in sorted(temporary.rglob("*")) if file.is_file()]
        entries = {str(file.relative_to(temporary)): _entry(file) for file in files}
        manifest = temporary / MANIFEST
        manifest.write_text(json.dumps({"files": entries}, indent=2) + "\n")
        folders = [inner for inner in temporary.rglob("*") if inner.is_dir()]
        for written in (*files, manifest, *folders, temporary):
            sync(written)
        path = folder.rename(temporary.name, f"checkpoint-{step}")
        sync(folder.path)
    except BaseException:
        if temporary.exists():
            folder.remove(temporary.name)
        raise
    return path


def read_state(path: Path) -> dict[str, Any]:
    """Read trainer_state.json of a checkpoint.

    Args:
        path: The folder of the checkpoint.

    Returns:
        The state.

    Raises:
        ValueError: It cannot be read, or does not hold the settings of a run.
    """
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path / STATE} cannot be read: {type(error).__name__}: {error!s:.100}") from None
    if not (isinstance(state, dict) and isinstance(state.get("config"), dict)):
        raise ValueError(f"{path / STATE} does not hold the state of a run")
    return state


def verify(path: Path, needed: Sequence[str] = ()) -> None:
    """Check that every file of a checkpoint has the size and the SHA-256 that its manifest lists.

    Args:
        path: The folder of the checkpoint.
        needed: Names of files that the manifest must list besides weights. Empty needs neither.

    Raises:
        ValueError: A file is missing or damaged, or the manifest itself is. The error names the file.
    """
    try:
        entries = json.loads((path / MANIFEST).read_text())["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path / MANIFEST} is missing or cannot be read: the checkpoint is not complete") from None
    for name in needed:
        if name not in expected:
            raise ValueError(f"{path / MANIFEST} does not list {name}: the checkpoint is not complete")
    if needed and not any(name.endswith(".safetensors") for name in expected):
        raise ValueError(f"{path / MANIFEST} lists no weights: the checkpoint is not complete")
    for name, (size, digest) in expected.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{path / MANIFEST} names {name!r}, which lies outside the checkpoint")
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file} is missing from the checkpoint")
        if _entry(file) != {"bytes": size, "sha256": digest}:
            raise ValueError(f"{file} is damaged: its size or SHA-256 differs from the one in {MANIFEST}")


def _entry(file):
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, has reached the disk.

    Args:
        path: A file or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(folder: RunFolder, limit: int, best: int | None = None) -> None:
    """Delete checkpoints until `limit` are left: the newest, the best, then the next newest ones.

    As in transformers, the newest and the best checkpoint both stay even at a limit of 1. Checkpoints that no run made
    here neither count nor are deleted.

    Args:
        folder: The folder of the run.
        limit: How many checkpoints to keep.
        best: The step of the best checkpoint, or None where no metric ranks them.
    """
    made = folder.made()
    found = {step: path for step, path in checkpoints(folder.path).items() if path in made}
    newest_first = sorted(found, reverse=True)
    kept = {*newest_first[:1], best} & set(found)
    kept |= set([step for step in newest_first if step not in kept][: max(0, limit - len(kept))])
    for step, path in found.items():
        if step not in kept:
            folder.remove(path.name)


class CheckpointLog(Protocol):
    """What a `Checkpointer` needs from the log of a run. `RunLog`, which imports this module, satisfies it.

    Attributes:
        dir: The path of the folder of the run.
        folder: The folder of the run.
        checkpoint: The checkpoint that the run continues from, or None for a new run.
        latest: The step and the value at which each metric was logged last, by the metric's name.
    """

    dir: Path
    folder: RunFolder
    checkpoint: Path | None
    latest: dict[str, tuple[int, float]]

    def say(self, text: str) -> None:
        """Print a line for the person who watches the run.

        Args:
            text: The line.
        """


class Checkpointer:
    """Decides when a checkpoint is saved and which ones are kept, and owns the thread that writes them.

    It is a context manager: leaving it waits for a checkpoint that is still being written.

    Args:
        config: The settings of the run.
        log: The log of the run, whose folder receives the checkpoints.
    """

    def __init__(self, config: TrainingConfig, log: CheckpointLog) -> None:
        self.config, self.log = config, log
        self._good = log.checkpoint
        self.saved = None if log.checkpoint is None else step_of(log.checkpoint)  # step of the last save
        metric = config.metric_for_best_model
        self.greater = not (metric or "").endswith("loss")
        if config.greater_is_better is not None:
            self.greater = config.greater_is_better
        self.best = None  # {"metric", "value", "step"} of the best checkpoint so far
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.wait()
        except ValueError as failure:
            if error is None:
                raise
            self.log.say(f"error: {failure}")  # only printed: the error that ends the run must stay the one raised
        finally:
            self._thread.shutdown()

    @property
    def newest(self) -> Path | None:
        """The newest good checkpoint of this run, or None. Waits for a checkpoint that is being written."""
        if self._writing is not None and self._writing.exception() is None:
            return self._writing.result()
        return self._good

    def due(self, step: int, last: bool) -> bool:
        """Tell whether a checkpoint is due after a step.

        Args:
            step: The number of steps that are done.
            last: Whether this was the last step, after which a checkpoint is always due.

        Returns:
            True where a checkpoint is due.
        """
        return last or (step > 0 and step % self.config.save_steps == 0)

    def save(self, step: int, take: Callable[[], Any]) -> None:
        """Take a snapshot now and have the thread write it while training continues.

        Waits first for a checkpoint that is still being written.

        Args:
            step: The number of steps that are done.
            take: Called without arguments. Returns a copy of the run's state in host memory, with a method
                `write(path)` that puts it into an empty folder.

        Raises:
            ValueError: The checkpoint before this one could not be written.
        """
        if self.saved == step:
            if self._measured(step):  # a stopped run saves first, and evaluates this step only after it is resumed
                self._compare(step)
            return
        self.wait()
        self._compare(step)
        snapshot = take()
        self.saved = step
        self._writing = self._thread.submit(self._write, step, snapshot)

    def check(self) -> None:
        """Raise the error of a save that has failed, without waiting for one that is under way.

        Raises:
            ValueError: A checkpoint could not be written. The error says why, and names the newest good checkpoint.
        """
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            ValueError: The checkpoint could not be written. The error says why, and names the newest good checkpoint.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            self._good = writing.result()
        except Exception as error:
            good = f"{self._good} is the newest good one" if self._good else "there is no earlier one"
            raise ValueError(
                f"checkpoint-{self.saved} could not be written to {self.log.dir}: {error}; {good}. Fix the cause, then "
                f"continue with --output_dir {self.log.dir} --resume_from_checkpoint auto"
            ) from error

    def _write(self, step, snapshot):
        for name in ("metrics.jsonl", "samples.jsonl"):  # the checkpoint records the lengths of these files
            with contextlib.suppress(FileNotFoundError):  # whoever deleted it shall not lose the weights too
                sync(self.log.dir / name)
        path = write_checkpoint(self.log.folder, step, snapshot.write)
        if self.config.save_total_limit is not None:
            prune(self.log.folder, self.config.save_total_limit, self.best and self.best["step"])
        return path

    def _measured(self, step):
        return self.log.latest.get(self.config.metric_for_best_model, (None, None))[0] == step

    def _compare(self, step):
        """Note this step as the best one where the metric that was logged for this very step says so."""
        metric = self.config.metric_for_best_model
        if metric is None:
            return
        value = self.log.latest[metric][1] if self._measured(step) else math.nan
        if math.isnan(value):
            self.log.say(f"step {step}: {metric} was not measured, so checkpoint-{step} cannot be the best one")
        elif self.best is None or (value > self.best["value"] if self.greater else value < self.best["value"]):
            self.best = {"metric": metric, "value": value, "step": step}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: which checkpoint is the best one.

        Returns:
            The state, as JSON can hold it.
        """
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the best checkpoint of the run that is resumed, unless the metric that ranks them has changed.

        Args:
            state: What `state_dict` returned.
        """
        best = state["best"]
        if best is not None and best["metric"] == self.config.metric_for_best_model:
            self.best = best
