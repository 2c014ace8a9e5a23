"""The log and the folder of a run as ranks other than 0 have them: rank 0 writes and speaks, and these do neither."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.run.folder import RunFolder
from fastgrpo.run.log import RunLog
from fastgrpo.run.terminal import Terminal


class FollowedFolder:
    """The folder of a run that rank 0 holds.

    Attributes:
        held: Whether rank 0 holds the folder still: it releases it when its log is closed, as all ranks close theirs.
    """

    check = RunFolder.check

    def __init__(self, path: Path) -> None:
        self.path, self.held = path, True

    def claim(self, name: str) -> Path:
        """Return the path of something that rank 0 makes in the folder."""
        return self.path / name

    def close(self) -> None:
        """Note that rank 0 releases the folder."""
        self.held = False


class FollowedLog(RunLog):
    """A log that knows what rank 0 knows, and writes nothing."""

    def __init__(self, config: TrainingConfig, path: Path, checkpoint: Path | None) -> None:
        self.started, self.config = time.perf_counter(), config
        self.folder, self.dir, self.checkpoint = FollowedFolder(path), path, checkpoint
        self._pending, self.latest, self.history = [], {}, []
        self.terminal = Terminal(silent=True)

    def write(self, step: int, values: dict[str, float]) -> dict[str, Any]:
        """Note what rank 0 writes, since a metric may decide which checkpoint is the best."""
        return self._note(step, values)

    def _append(self, name, rows):
        """Write no lines: rank 0 does."""

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]], shown: int | None) -> None:
        """Show no completions."""

    def discard(self) -> None:
        """Give up the run, as rank 0 does."""
        self.close()

    def close(self) -> None:
        """Note that the run has ended, so that this rank refuses to go on as rank 0 does."""
        self.folder.close()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to where the log stood at a checkpoint."""
        self._go_back(state)


def open_log(config: TrainingConfig, inputs: Mapping[str, Path] | None = None, ranks: Ranks = ALONE) -> RunLog:
    """Claim the folder of a run on rank 0, and tell the other ranks of it."""
    log = RunLog(config, inputs) if ranks.lead else None
    where = ranks.from_lead(None if log is None else (log.dir, log.checkpoint), "the folder of the run")
    return FollowedLog(config, *where) if log is None else log
