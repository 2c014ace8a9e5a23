"""The folder of a run. One run at a time owns it, and never deletes or overwrites files that no run made.

A run writes the name of each file and folder to `MADE` before it creates it. Overwriting deletes only these names. A
run refuses a folder that holds one of its names, if no run made that file.
"""

import contextlib
import gc
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

RUNS = Path("runs")
LOCK = ".lock"
MADE = ".made-by-runs"
# All names that a run uses in its folder. Nothing else is ever noted or deleted.
NAMES = re.compile(
    r"config\.json|metrics\.jsonl|samples\.jsonl|warnings\.jsonl|curves\.png|report\.html|summary\.json|trace\.json\.gz|merged|warm-start|tensorboard"
    r"|wandb|trackers\.json|completions|final|trainer_state\.json|[\w-]+_results\.json"
    r"|sweep\.(csv|png)|\S+=\S+\.log|(stale-|\.tmp-)?checkpoint-\d+\+*"
)
SWEEP_TABLE = "sweep.csv"  # noted in the folder of a sweep
SEEN_AFTER = 10  # seconds that ranks wait for a folder
_GONE = "deleted "  # prefix of the line of a deleted name


class RunFolder:
    """A folder that this process holds for a run until `close`, or until the process ends."""

    def __init__(self, path: Path) -> None:
        # The run stays in this folder even if the working directory or links on the way change.
        self.path = Path(os.path.realpath(path))
        self._lock = lock(self.path)

    @property
    def held(self) -> bool:
        """Whether the folder has not been released yet."""
        return self._lock.is_locked

    def check(self) -> None:
        """Raise if the folder is no longer held."""
        if not self.held:
            raise ValueError(
                f"this trainer no longer holds output_dir {self.path}, because its run has ended; make a new trainer, "
                "with resume_from_checkpoint='auto' to resume the run"
            )

    def close(self) -> None:
        """Release the folder."""
        self._lock.release()

    @contextlib.contextmanager
    def held_for(self) -> Iterator[None]:
        """Hold the folder within a context, even if it was released before."""
        with contextlib.nullcontext() if self.held else contextlib.closing(RunFolder(self.path)):
            yield

    def made(self) -> list[Path]:
        """Return the existing files and folders that runs made."""
        noted = made_in(self.path)
        return [path for path in sorted(self.path.iterdir()) if path.name in noted]

    def foreign(self) -> list[Path]:
        """Return the files and folders with a run's name that no run made."""
        noted = made_in(self.path)
        return [path for path in sorted(self.path.iterdir()) if NAMES.fullmatch(path.name) and path.name not in noted]

    def refuse_foreign(self) -> None:
        """Refuse the folder if a run would overwrite files that no run made."""
        foreign = self.foreign()
        if foreign:
            raise ValueError(
                f"output_dir {self.path} holds {foreign[0].name}, which no run made, and a new run would overwrite it; "
                "move it away, or choose another folder"
            )

    def claim(self, name: str) -> Path:
        """Note a file or folder before this run creates it."""
        path = self.path / name
        if name not in made_in(self.path):
            if os.path.lexists(path):
                raise ValueError(f"{path} was not made by a run and is not overwritten; move it away")
            note(self.path, name)
        return path

    def rename(self, old: str, new: str) -> Path:
        """Rename a file or folder that a run made."""
        path = (self.path / old).rename(self.claim(new))
        note(self.path, old, gone=True)
        return path

    def remove(self, name: str) -> None:
        """Delete a file or folder that a run made."""
        assert name in made_in(self.path), name
        remove(self.path / name)
        note(self.path, name, gone=True)

    def empty(self) -> None:
        """Delete all files and folders that runs made. Everything else stays."""
        for path in self.made():
            self.remove(path.name)
        if gone := made_in(self.path):  # deleted by a person
            note(self.path, *gone, gone=True)


def lock(path: Path) -> FileLock:
    """Lock a folder until the lock is released or the process ends, however it ends. Refuse a folder in use."""
    file, me = path / LOCK, f"process {os.getpid()} on {socket.gethostname()}"
    owner = _owner(file)
    held = FileLock(file, timeout=0, thread_local=False)  # the checkpoint thread also checks the lock
    try:
        held.acquire()
    except Timeout:
        gc.collect()  # a trainer without references releases its folder
        try:
            held.acquire()
        except Timeout:
            if owner == me:
                raise ValueError(
                    f"output_dir {path} is in use by another trainer of this process; let its train() end, or release "
                    "the folder with trainer.log.close()"
                ) from None
            raise ValueError(
                f"output_dir {path} is in use by another run ({owner}); wait until it ends, or choose another folder"
            ) from None
    if not isinstance(held, SoftFileLock):  # without flock, filelock writes the holder, and checks that it lives
        file.write_text(me)
    return held


def _owner(file):
    """Read the last owner of a lock. Raises ValueError if the file is not the lock of a run."""
    try:
        owner = file.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    if re.fullmatch(r"(process \d+ on .*)?", owner):
        return owner
    if holder := re.fullmatch(r"(\d+)\n(.+)\n(\d+\n)?", owner):  # of filelock, on a file system without flock
        return f"process {holder[1]} on {holder[2]}"
    raise ValueError(f"{file} is not the lock of a run; move it away, or choose another output_dir")


def see(path: Path, owner: str | None = None) -> None:
    """Raise ValueError unless this machine sees a folder of rank 0, with this `owner` in its lock.

    A folder of the same name on another disk has another owner. A network file system may take seconds.
    """
    lock = path / LOCK
    for _ in range(SEEN_AFTER):
        if path.is_dir() and (owner is None or (lock.is_file() and lock.read_text(errors="replace") == owner)):
            return
        time.sleep(1)
    raise ValueError(
        f"{socket.gethostname()} does not see {path}, which rank 0 has made: output_dir must lie in a file system that "
        "all machines of the run share"
    )


def made_in(path: Path) -> set[str]:
    """Read the names of existing files and folders that runs made in a folder."""
    try:
        lines = (path / MADE).read_text(errors="replace").splitlines()
    except OSError:
        return set()
    noted = {line.removeprefix(_GONE): not line.startswith(_GONE) for line in lines}  # the last line of a name counts
    return {name for name, there in noted.items() if there and NAMES.fullmatch(name)}


def note(path: Path, *names: str, gone: bool = False) -> None:
    """Note files that a run is about to create in a folder, or has deleted.

    The notes are synced to disk before this returns, so a crash of the machine never loses the note of an existing
    file.
    """
    assert all(NAMES.fullmatch(name) for name in names), names
    with open(path / MADE, "a") as file:
        file.writelines((_GONE if gone else "") + name + "\n" for name in names)
        file.flush()
        os.fsync(file.fileno())


def claim_output_dir(
    output_dir: str | None,
    name: str,
    overwrite: bool = False,
    resume: bool = False,
    inputs: Mapping[str, Path] | None = None,
) -> RunFolder:
    """Create and lock the folder of a run."""
    try:
        if output_dir is None:
            return RunFolder(_next_numbered(name))
        path = Path(os.path.realpath(output_dir))
        if path.exists() and not path.is_dir():
            raise ValueError(f"output_dir {path} is a file; name a folder")
        for what, file in (inputs or {}).items():
            if Path(file).resolve().is_relative_to(path):
                raise ValueError(
                    f"{what} {file} lies inside output_dir {path}, where the run could overwrite it; choose another "
                    "output_dir"
                )
        if not (overwrite or resume) and path.exists() and contents(path):
            if (path / LOCK).exists():
                RunFolder(path).close()  # if a run holds the folder, this raises a better error
            if begun(path):
                raise ValueError(
                    f"output_dir {path} is not empty; choose another folder, delete the files of the earlier run with "
                    "--overwrite_output_dir True, or continue that run with --resume_from_checkpoint auto"
                )
            overwrite = True
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path)
        if overwrite:
            try:
                folder.refuse_foreign()
                folder.empty()
            except BaseException:
                folder.close()
                raise
        return folder
    except OSError as error:
        raise ValueError(
            f"output_dir {error.filename or output_dir} cannot be written: {error.strerror}; choose another folder"
        ) from error


def begun(path: Path) -> bool:
    """Return whether a folder has more than the settings and empty logs that a run writes before its first step."""
    noted = made_in(path)
    return not all(
        entry.name in noted and (entry.name == "config.json" or (entry.suffix == ".jsonl" and not entry.stat().st_size))
        for entry in contents(path)
    )


def contents(path: Path) -> list[Path]:
    """List the entries of a folder without the lock and the notes of runs."""
    return sorted(entry for entry in path.iterdir() if entry.name not in (LOCK, MADE))


def _next_numbered(name):
    """Create the folder runs/NAME-N with the next free number. Other runs may start at the same moment."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"task {name!r} cannot name a folder; set output_dir")
    RUNS.mkdir(exist_ok=True)
    while True:
        taken = [re.fullmatch(rf"{re.escape(name)}-(\d+)", path.name) for path in RUNS.iterdir()]
        path = RUNS / f"{name}-{max((int(match[1]) for match in taken if match), default=0) + 1}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue  # another run has just taken this number


def remove(path: Path) -> None:
    """Delete a file, a folder with its content, or a symbolic link but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
