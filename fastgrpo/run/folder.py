"""The folder of a run: one process at a time owns it through a lock, and it is emptied only on request."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
from pathlib import Path
from typing import TextIO

RUNS = Path("runs")
LOCK = ".lock"
# Glob patterns of everything that a run writes into its folder. Only these are ever deleted from it.
RUN_FILES = (
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "curves.png",
    "summary.json",
    "checkpoint-*",
    "stale-checkpoint-*",
    ".tmp-checkpoint-*",
    "merged",
    "trace.json.gz",
    "warm-start",
    "tensorboard",
)


def claim_output_dir(
    output_dir: str | None, task: str, overwrite: bool = False, resume: bool = False
) -> tuple[Path, TextIO]:
    """Create and lock the folder of a run.

    Args:
        output_dir: The folder. None takes the next free runs/TASK-N.
        task: The name of the task, which names the folder where `output_dir` is None.
        overwrite: Whether to delete what an earlier run left in the folder. Other files stay.
        resume: Whether a folder that is not empty is accepted as it is.

    Returns:
        The folder and its lock. The folder belongs to this process until the lock is closed or the process ends.

    Raises:
        ValueError: The folder is not empty and may not be overwritten, is a file, cannot be written, or is in use.
    """
    try:
        if output_dir is None:
            path = _next_numbered(task)
        else:
            path = Path(output_dir)
            if path.is_file():
                raise ValueError(f"output_dir {path} is a file; name a folder")
            if not (overwrite or resume) and path.exists() and any(old.name != LOCK for old in path.iterdir()):
                raise ValueError(
                    f"output_dir {path} is not empty; choose another folder, delete what a run left in it with "
                    "--overwrite_output_dir True, or continue that run with --resume_from_checkpoint auto"
                )
            path.mkdir(parents=True, exist_ok=True)
        lock = hold(path)
    except OSError as error:
        raise ValueError(
            f"output_dir {error.filename or output_dir} cannot be written: {error.strerror}; choose another folder"
        ) from error
    if overwrite:
        empty(path)
    return path, lock


def _next_numbered(task):
    if not re.fullmatch(r"\w[\w.-]*", task):
        raise ValueError(f"task {task!r} cannot name a folder; set output_dir")
    RUNS.mkdir(exist_ok=True)
    taken = [re.fullmatch(rf"{re.escape(task)}-(\d+)", path.name) for path in RUNS.iterdir()]
    number = max((int(match[1]) for match in taken if match), default=0) + 1
    path = RUNS / f"{task}-{number}"
    path.mkdir()  # raises where another run has just taken this number
    return path


def hold(path: Path) -> TextIO:
    """Lock a folder for this process.

    The lock is a POSIX record lock: it ends with the process, however that ends, and child processes do not inherit
    it, so a child that outlives the run does not keep the folder locked.

    Args:
        path: The folder.

    Returns:
        The open file that carries the lock. Closing it releases the folder.

    Raises:
        ValueError: Another process holds the lock.
    """
    lock = open(path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - stays open as long as the run
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ValueError(
                f"output_dir {path} is in use by a run that is still alive ({owner}); wait until it ends, or choose "
                "another folder"
            ) from None
        raise
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock


def is_run(path: Path) -> bool:
    """Tell whether a folder is the folder of a run, by the settings that a run writes there first.

    Args:
        path: The folder.

    Returns:
        True where config.json holds the settings of a run.
    """
    try:
        return "resume_from_checkpoint" in json.loads((path / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def empty(path: Path) -> None:
    """Delete what a run leaves in its folder. Other files stay.

    Args:
        path: The folder of a run.
    """
    for pattern in RUN_FILES:
        for old in path.glob(pattern):
            remove(old)


def remove(path: Path) -> None:
    """Delete a file, a folder with all that is in it, or a symbolic link but not its target.

    Args:
        path: What to delete.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
