"""Checkpoints: folders that are whole or not there at all, written by a thread while training goes on.

A checkpoint is written beside its place, synced, listed in manifest.json with the SHA-256 of every file, synced again,
and renamed: a process may be killed at any moment, and the last good one is there. What is in it: `snapshot.py`.
"""

import hashlib
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from fastgrpo.run.folder import remove

MANIFEST = "manifest.json"
CHUNK = 1 << 24  # bytes hashed at a time: large, because each chunk has to win the interpreter's lock anew


def save_model(path, model, tokenizer, state_dict=None):
    """Weights (safetensors), config and tokenizer, as `AutoModelForCausalLM.from_pretrained` reads them.

    state_dict: the weights to save, or None for the model's own.
    """
    model.save_pretrained(path, state_dict=state_dict)
    tokenizer.save_pretrained(path)


def checkpoints(run_dir):
    """{step: Path} of the checkpoints in a run folder, good or not, in the order of their steps."""
    found = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(run_dir).iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match and path.is_dir()))


def step_of(path):
    """The step in a checkpoint's name. Raises ValueError for a path that does not end in checkpoint-STEP."""
    match = re.fullmatch(r"checkpoint-(\d+)", Path(path).name)
    if match is None:
        raise ValueError(f"{path} is no checkpoint: its name must be checkpoint-STEP")
    return int(match[1])


def write_checkpoint(run_dir, step, write):
    """run_dir/checkpoint-STEP, whole or not at all.

    Args:
        write: called with the Path of the folder to put the files into.

    Returns:
        its Path.

    Raises:
        OSError: what kept it from being written; nothing of it is left then.
    """
    for leftover in run_dir.glob(".tmp-checkpoint-*"):
        remove(leftover)
    path, temporary = run_dir / f"checkpoint-{step}", run_dir / f".tmp-checkpoint-{step}"
    temporary.mkdir()
    try:
        write(temporary)
        files = [file for file in sorted(temporary.rglob("*")) if file.is_file()]
        entries = {str(file.relative_to(temporary)): _entry(file) for file in files}
        manifest = temporary / MANIFEST
        manifest.write_text(json.dumps({"files": entries}, indent=2) + "\n")
        folders = [folder for folder in temporary.rglob("*") if folder.is_dir()]
        for written in (*files, manifest, *folders, temporary):
            sync(written)
        temporary.rename(path)
        sync(run_dir)
    except BaseException:
        if temporary.exists():
            remove(temporary)
        raise
    return path


def verify(path):
    """Raises ValueError where a checkpoint is not what was written, naming the file."""
    try:
        entries = json.loads((path / MANIFEST).read_text())["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path / MANIFEST} is missing or cannot be read: the checkpoint is not complete") from None
    for name, (size, digest) in expected.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{path / MANIFEST} names {name!r}, which lies outside of the checkpoint")
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file} is missing from the checkpoint")
        if _entry(file) != {"bytes": size, "sha256": digest}:
            raise ValueError(f"{file} is damaged: it is not what {MANIFEST} says was written")


def _entry(file):
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync(path):
    """Wait until a file or a folder's list of names is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(run_dir, limit, best=None):
    """Delete checkpoints until `limit` are left: the newest, the one of step `best`, then the next newest.

    Where `best` is not the newest, both stay even at a limit of 1, as in transformers.
    """
    found = checkpoints(run_dir)
    newest_first = sorted(found, reverse=True)
    kept = {*newest_first[:1], best} & set(found)
    kept |= set([step for step in newest_first if step not in kept][: max(0, limit - len(kept))])
    for step, path in found.items():
        if step not in kept:
            remove(path)


class Checkpointer:
    """When to save, which checkpoint is the best, which are kept; the thread that writes them.

    A context: leaving it waits for the thread.
    """

    def __init__(self, config, log):
        """config: `GRPOConfig`. log: the `RunLog`, whose folder the checkpoints go to."""
        self.config, self.log = config, log
        self._good = log.checkpoint
        self.saved = None if log.checkpoint is None else step_of(log.checkpoint)  # the step that was saved last
        metric = config.metric_for_best_model
        self.greater = not (metric or "").endswith("loss")
        if config.greater_is_better is not None:
            self.greater = config.greater_is_better
        self.best = None  # {"metric", "value", "step"}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.wait()
        except ValueError as failure:
            if error is None:
                raise
            self.log.say(f"error: {failure}")  # beside the error that ends the run, which goes on its way
        finally:
            self._thread.shutdown()

    @property
    def newest(self):
        """Path of the newest good checkpoint of this run, or None; a save under way is waited for."""
        if self._writing is not None and self._writing.exception() is None:
            return self._writing.result()
        return self._good

    def due(self, step, last):
        """Whether a checkpoint is due after this step: the last one always is."""
        return last or (step > 0 and step % self.config.save_steps == 0)

    def save(self, step, take):
        """Take a snapshot now and have it written while training goes on; a save under way is waited for first.

        Args:
            take: () -> an object with `write(path)`: the state of the run on the host.

        Raises:
            ValueError: as `wait`.
        """
        if self.saved == step:
            if self._measured(step):  # after a stop, the evaluation of its step comes when the run goes on
                self._compare(step)
            return
        self.wait()
        self._compare(step)
        snapshot = take()
        self.saved = step
        self._writing = self._thread.submit(self._write, step, snapshot)

    def check(self):
        """Raises ValueError where the thread failed: what and why, and which checkpoint is the newest good one."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self):
        """Wait for the save under way. Raises ValueError as `check`."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            self._good = writing.result()
        except Exception as error:
            good = f"{self._good} is the newest good one" if self._good else "there is no earlier one"
            raise ValueError(
                f"checkpoint-{self.saved} could not be written to {self.log.dir}: {error}; {good}; mend this, then go "
                f"on with --output_dir {self.log.dir} --resume_from_checkpoint auto"
            ) from error

    def _write(self, step, snapshot):
        for name in ("metrics.jsonl", "samples.jsonl"):  # the checkpoint says how long they are
            sync(self.log.dir / name)
        path = write_checkpoint(self.log.dir, step, snapshot.write)
        if self.config.save_total_limit is not None:
            prune(self.log.dir, self.config.save_total_limit, self.best and self.best["step"])
        return path

    def _measured(self, step):
        return self.log.latest.get(self.config.metric_for_best_model, (None, None))[0] == step

    def _compare(self, step):
        """Whether the policy of this step is the best so far, by what was logged of this very step."""
        metric = self.config.metric_for_best_model
        if metric is None:
            return
        value = self.log.latest[metric][1] if self._measured(step) else math.nan
        if math.isnan(value):
            self.log.say(f"step {step}: {metric} was not measured, checkpoint-{step} cannot be the best")
        elif self.best is None or (value > self.best["value"] if self.greater else value < self.best["value"]):
            self.best = {"metric": metric, "value": value, "step": step}

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        best = state["best"]
        if best is not None and best["metric"] == self.config.metric_for_best_model:
            self.best = best
