"""When a run saves, and which checkpoints stay. A thread writes them while training continues."""

import contextlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.ranks import ALONE, RankLost, Ranks, apart, together
from fastgrpo.run.checkpoint import prune, step_of, sync, write_checkpoint
from fastgrpo.run.folder import RunFolder


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
        """Print a line for the person who watches the run."""


class Checkpointer:
    """Decides when a checkpoint is saved and which ones are kept, and owns the thread that writes them.

    It is a context manager: leaving it waits for a checkpoint that is still being written.

    Attributes:
        ranks: The ranks as the threads talk to each other, of which a snapshot that they write has to know.
    """

    def __init__(self, config: TrainingConfig, log: CheckpointLog, ranks: Ranks = ALONE) -> None:
        self.config, self.log = config, log
        self._trainers = ranks
        self.ranks = apart(ranks, "checkpoint", config.ddp_timeout)
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
        except (ValueError, RankLost) as failure:
            if error is None:
                raise
            if not isinstance(failure, RankLost):  # else the rank that was lost has ended the run too
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
        """Tell whether a checkpoint is due after a step."""
        every = self.config.save_steps
        return last or (step > 0 and every is not None and step % every == 0)

    def save(self, step: int, take: Callable[[], Any]) -> None:
        """Take a snapshot now and have the thread write it while training continues.

        Waits first for a checkpoint that is still being written.
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

        All ranks raise it after the same step, though one may have heard of it before the others.
        """
        if self._writing is None:
            return
        failed = self._writing.done() and self._writing.exception() is not None
        if self._trainers.any(failed, f"whether checkpoint-{self.saved} was written"):
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            self._good = writing.result()
        except RankLost:
            raise
        except Exception as error:
            good = f"{self._good} is the newest good one" if self._good else "there is no earlier one"
            raise ValueError(
                f"checkpoint-{self.saved} could not be written to {self.log.dir}: {error}; {good}. Fix the cause, then "
                f"continue with --output_dir {self.log.dir} --resume_from_checkpoint auto"
            ) from error

    def _write(self, step, snapshot):
        lead, folder = self.ranks.lead, self.log.folder
        for name in ("metrics.jsonl", "samples.jsonl") if lead else ():  # the checkpoint records their lengths
            with contextlib.suppress(FileNotFoundError):  # whoever deleted it shall not lose the weights too
                sync(self.log.dir / name)
        path = write_checkpoint(folder, step, snapshot.write, self.ranks)
        limit, best = self.config.save_total_limit, self.best and self.best["step"]
        if limit is not None:
            together(self.ranks, lambda: prune(folder, limit, best) if lead else None, "the end of older checkpoints")
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
        """Return what a resumed run needs: which checkpoint is the best one."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the best checkpoint of the run that is resumed, unless the metric that ranks them has changed."""
        best = state["best"]
        if best is not None and best["metric"] == self.config.metric_for_best_model:
            self.best = best
