"""Trackers of metrics and completions: TensorBoard, Weights & Biases and trackio.

They get the names of TRL's trainers: `train/reward`, `eval/accuracy`, and a table `completions` per logged step. A
resumed run continues its tracked run, whose id is in trackers.json. Steps after the checkpoint are sent again, with
equal values.
"""

import contextlib
import dataclasses
import io
import json
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.run.checkpoint import step_of
from fastgrpo.run.folder import RunFolder
from fastgrpo.run.metrics import entry

KNOWN = "trackers.json"
STEP = "train/global_step"  # the axis of every metric, as transformers' trainers have it


def named(step: int, values: Mapping[str, float]) -> dict[str, float]:
    """Name metrics as transformers' trainers do for trackers."""
    measured = entry(step, values)
    measured.pop("step")
    found = {}
    for name, value in measured.items():
        prefix, _, rest = name.partition("_")
        if value is not None:
            found[f"{prefix}/{rest}" if prefix in ("eval", "test") and rest else f"train/{name}"] = value
    return found


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, config: TrainingConfig, folder: RunFolder, checkpoint: Path | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides the values that the interrupted run wrote after the checkpoint.
        purge_step = None if checkpoint is None else step_of(checkpoint) + 1
        self.writer = SummaryWriter(folder.claim("tensorboard"), purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Ignore tables, which TensorBoard does not have."""

    def close(self, failed: bool = False) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases, whose files lie in the folder `wandb` of the run."""

    live: ClassVar[set[str]] = set()  # ids of runs that trainers of this process have begun and not ended

    def __init__(self, config: TrainingConfig, folder: RunFolder, checkpoint: Path | None) -> None:
        import wandb

        self.wandb = wandb
        # Log to the run that a script has begun and ends, as transformers' trainers do, but not to another trainer's.
        self.given = None if wandb.run is None or wandb.run.id in self.live else wandb.run
        try:
            self.run = self.given or self._begin(config, folder)
        except pydantic.ValidationError as error:  # of an environment variable
            wrong = error.errors()[0]
            name = f"WANDB_{wrong['loc'][0]}".upper()
            raise ValueError(f"report_to wandb: the environment variable {name}: {wrong['msg']}") from None
        except self.wandb.errors.Error as error:
            raise ValueError(f"report_to wandb: {error}; log in by `wandb login`, or set WANDB_MODE=offline") from error
        self.run.config.update(dataclasses.asdict(config), allow_val_change=True)
        # W&B refuses decreasing steps, so the step is a metric, as in transformers.
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP, step_sync=True)
        self.table = None

    def _begin(self, config, folder):
        folder.claim("wandb")  # W&B makes this folder in the run folder
        known = _known(folder, "wandb", {"id": secrets.token_hex(4)})
        run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", config.project),
            name=config.run_name or folder.path.name,
            dir=folder.path,
            id=known["id"],
            resume="allow",
            reinit="create_new" if self.live else None,  # by default, W&B returns or ends a run in progress
            settings=self.wandb.Settings(silent=config.quiet),
        )
        self.live.add(run.id)
        return run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, STEP: step})

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        # An incremental table keeps earlier rows: a new table of the same name would hide them.
        if self.table is None or self.table.columns != list(columns):
            self.table = self.wandb.Table(columns=list(columns), log_mode="INCREMENTAL", allow_mixed_types=True)
        for row in zip(*columns.values(), strict=True):
            self.table.add_data(*row)
        self.run.log({"completions": self.table, STEP: step})

    def close(self, failed: bool = False) -> None:
        if self.given is None:
            self.run.finish(exit_code=int(failed))  # W&B marks a run with another code than 0 as failed
            self.live.discard(self.run.id)


class Trackio:
    """A run of trackio, in its SQLite database (in TRACKIO_DIR, or Hugging Face's cache). `trackio show` shows it."""

    live: ClassVar[set[str]] = set()  # names of runs that trainers of this process have begun and not ended

    def __init__(self, config: TrainingConfig, folder: RunFolder, checkpoint: Path | None) -> None:
        import trackio

        self.trackio = trackio
        store = Path(self.trackio.utils.TRACKIO_DIR)
        try:  # trackio itself only warns
            store.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=store).close()
        except OSError as error:
            raise ValueError(
                f"report_to trackio: {store} cannot be written: {error.strerror}; set TRACKIO_DIR to another folder"
            ) from None
        # Runs are found only by name, and a resumed run gets the newest run of its name. Without a suffix, that
        # could be the run of another folder with the same --run_name.
        known = _known(folder, "trackio", {"name": f"{config.run_name or folder.path.name}-{secrets.token_hex(4)}"})
        self.name, self.quiet, current = known["name"], config.quiet, self.trackio.context_vars.current_run
        if getattr(current.get(), "name", None) in self.live:  # `init` would end the run of another trainer
            current.set(None)
        self.live.add(self.name)
        with self._said():
            self.run = self.trackio.init(
                project=config.project, name=known["name"], resume="never" if checkpoint is None else "allow",
                config=dataclasses.asdict(config), embed=False, auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def _said(self):
        """Silence trackio with --quiet; it prints the address of its pages and has no such setting."""
        return contextlib.redirect_stdout(io.StringIO()) if self.quiet else contextlib.nullcontext()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, STEP: step}, step=step)

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        table = self.trackio.Table(columns=list(columns), data=rows)
        self.run.log({"completions": table}, step=step)

    def close(self, failed: bool = False) -> None:
        current = self.trackio.context_vars.current_run
        with self._said():
            self.run.finish()
        self.live.discard(self.name)
        if current.get() is self.run:  # otherwise another trainer's run is the current one
            current.set(None)


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def _known(folder, name, new):
    """Return the tracker's id of the run from trackers.json, or store and return `new`.

    The folder of a new run is empty, so an existing file belongs to this run, or to the run of which it is a copy.
    """
    path, here = folder.path / KNOWN, str(folder.path)
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
        home = known.get("folder", here)
        if home != here and (Path(home) / KNOWN).exists():  # a copy: its original goes on with these ids
            known = {}
        if name not in known or home != here:
            known = {name: new, **known, "folder": here}
            folder.claim(KNOWN).write_text(json.dumps(known, indent=2) + "\n")
        return {key: str(known[name][key]) for key in new}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error!s:.100}); delete it to start a new run in the "
            f"trackers, or leave {name} out of report_to"
        ) from None
