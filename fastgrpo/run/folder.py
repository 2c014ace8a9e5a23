"""The folder of a run: claimed once, held by a lock while the run lives, emptied only when asked."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
from pathlib import Path

RUNS = Path("runs")
LOCK = ".lock"
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


def claim_output_dir(output_dir, task, overwrite=False, resume=False):
    """Create and lock the folder of a run.

    Args:
        output_dir: the folder, or None for the next free runs/TASK-N. overwrite: delete what an earlier run left in
            it (and nothing else). resume: a folder with something in it is welcome as it is.

    Returns:
        (Path, lock): the folder belongs to this process until the lock is closed or the process dies.

    Raises:
        ValueError: the folder is not empty and may not be overwritten, is a file, cannot be written, or is in use.
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
                    f"output_dir {path} is not empty; choose another, or pass --overwrite_output_dir True, or go on "
                    "with --resume_from_checkpoint auto"
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
    path.mkdir()  # raises where another run has just claimed it
    return path


def hold(path):
    """Lock a folder. Returns the open file that is the lock; it ends with the process, however that dies.

    The lock is of POSIX's kind: child processes do not inherit it, so one that outlives the run does not keep it.

    Raises:
        ValueError: another process holds it.
    """
    lock = open(path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - open while the run lasts
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ValueError(
                f"output_dir {path} is in use by a run that still lives ({owner}); wait for its end, or choose another "
                "folder"
            ) from None
        raise
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock


def is_run(path):
    """Whether a folder is that of a run: the first thing that a run writes is its settings."""
    try:
        return "resume_from_checkpoint" in json.loads((path / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def empty(path):
    """Delete what a run leaves in its folder, and nothing else."""
    for pattern in RUN_FILES:
        for old in path.glob(pattern):
            remove(old)


def remove(path):
    """Delete a file, a folder, or a link (not what it points to)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
