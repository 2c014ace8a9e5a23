"""How a trainer comes to the folder of its run: at once, or where a script says in `train` what to go on from."""

import dataclasses
import math

from fastgrpo.run.checkpoint import Checkpointer
from fastgrpo.run.curves import table
from fastgrpo.run.health import Watch
from fastgrpo.run.log import open_log
from fastgrpo.run.profiling import Profiler
from fastgrpo.trainer.callbacks import Arguments


class Opening:
    """The beginning of a `Trainer`, which has the settings, the ranks, the policy and the callbacks."""

    def _open(self, log=None):
        """Claim the folder of the run, unless the log has, and make what needs it."""
        args = self.args
        self.log = log = log or open_log(args, self.inputs, self.ranks)
        self.state.log_history = log.history
        self.checkpoints = Checkpointer(args, log, self.ranks)
        self.watch = Watch(args, self.checkpoints)
        self.profiler = Profiler(args.profile if self.ranks.lead else 0, log.folder, log.say)
        if self.plan and math.isfinite(self.plan.room):
            log.say(f"memory of this run\n{table(self.plan.rows())}")
        if self.ranks.size > 1:
            log.say(f"{self.ranks.size} processes share the run by {self.made.parallel} ({self.made.why})")
        for warning in self._advice():
            log.say(warning)
        self.callbacks.args = Arguments(args, self.ranks, log.dir, bool(self.held_out), self.checkpoints.greater)

    def open(self) -> None:
        """Claim the folder of the run, where the trainer has waited with it."""
        if self.log is None:
            self._open()

    def _go_on_from(self, checkpoint):
        """Open the run that `train` was told to go on with; without a word of it a new one, or that of the settings."""
        if checkpoint in (None, False):
            return self.open()
        begun = self.log is not None and (
            self.state.global_step or self.log.checkpoint is not None or self.log.history or self.left
        )
        if begun:
            raise ValueError(f"resume_from_checkpoint={checkpoint!r}: this trainer has begun a run; make a new one")
        resume = "auto" if checkpoint is True else str(checkpoint)
        self.args = dataclasses.replace(self.args, resume_from_checkpoint=resume, overwrite_output_dir=False)
        if self.log is not None:
            self.log.discard()
        self._open()

    def _advice(self):
        """Return warnings about settings, which the run begins with."""
        return []
