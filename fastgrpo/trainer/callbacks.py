"""Runs the callbacks of transformers: events, control flags, and their state in checkpoints.

Events come in transformers' order: on_step_begin, the step, on_step_end, on_log, on_evaluate, on_save. A step is a
rollout with all its updates. There are no events for single updates and for batches of an evaluation.

With several ranks, every rank calls its callbacks. A flag set on one rank applies to all.
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, TrainerCallback, TrainerControl
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState
from transformers.trainer_utils import IntervalStrategy

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.data.records import TrainerState
from fastgrpo.ranks import Ranks
from fastgrpo.run.metrics import evaluated

logger = logging.getLogger(__name__)

NEVER = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_prediction_step", "on_predict")
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
CONTROL = "TrainerControl"  # key of the flags in checkpoints, as in transformers


class Arguments:
    """The settings of a run for callbacks: ours, and transformers' names derived from them."""

    load_best_model_at_end = False
    n_gpu = 1
    eval_delay = 0

    def __init__(
        self, config: TrainingConfig, ranks: Ranks, output_dir: Path, evaluates: bool, greater: bool = True
    ) -> None:
        self.config = config
        self.output_dir = str(output_dir)
        self.greater_is_better = greater
        self.world_size, self.process_index = ranks.size, ranks.rank
        self.should_save = self.should_log = ranks.lead
        steps, no = IntervalStrategy.STEPS, IntervalStrategy.NO
        self.logging_strategy = self.save_strategy = steps
        self.eval_strategy = steps if evaluates and config.eval_steps else no
        metric = config.metric_for_best_model
        prefix, slash, _ = (metric or "").partition("/")
        if slash and (prefix == "eval" or prefix.startswith("eval_")):
            metric = next(iter(evaluated({metric: 0.0}, prefix)))
        self.metric_for_best_model = metric

    def __getattr__(self, name: str) -> Any:
        """Return a setting by name. Raise AttributeError if there is none."""
        if name.startswith("__") or name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, as the callbacks of transformers log them."""
        return dataclasses.asdict(self.config) | {"output_dir": self.output_dir}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return all settings, with values other than numbers, booleans and strings converted to strings."""
        return {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in self.to_dict().items()}

    def to_json_string(self) -> str:
        """Return all settings as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)


class Callbacks:
    """Calls the callbacks of a run with transformers' handler.

    `control` has the flags that callbacks set, and `args` the settings for them. `args.output_dir` is the path of the
    run once its folder is claimed.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None,
        state: TrainerState,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: Any,
        schedule: Any,
        ranks: Ranks,
    ) -> None:
        self.state, self.ranks, self.control, self.args = state, ranks, TrainerControl(), None
        self.decide = False  # whether any rank has callbacks
        # The handler warns without a DefaultFlowCallback. Our loop decides when to log, evaluate and save.
        self.handler = CallbackHandler([DefaultFlowCallback], model, tokenizer, optimizer, schedule)
        self.handler.pop_callback(DefaultFlowCallback)
        for callback in callbacks or ():
            self.add(callback)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, and warn of its events that are never called."""
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise ValueError(f"callbacks: {kind.__name__} is not a transformers.TrainerCallback; inherit from it")
        never = [name for name in NEVER if getattr(kind, name) is not getattr(TrainerCallback, name)]
        if never:
            logger.warning("%s of %s is never called: a step is a whole rollout here", ", ".join(never), kind.__name__)
        self.handler.add_callback(callback)

    def begin(self) -> None:
        """Begin the training, and check whether any rank has callbacks, so that flags must be exchanged."""
        metric = self.args.metric_for_best_model
        stops = any(isinstance(callback, EarlyStoppingCallback) for callback in self.handler.callbacks)
        if stops and metric is not None and not metric.startswith("eval_"):
            raise ValueError(
                f"metric_for_best_model={metric!r} is a training metric, but EarlyStoppingCallback would read "
                f"eval_{metric}; set metric_for_best_model='eval_{metric}'"
            )
        self.decide = self.ranks.any(bool(self.handler.callbacks), "the check for callbacks")
        self.call("on_train_begin")

    def any_handles(self, event: str) -> bool:
        """Return whether any callback on any rank handles an event. All ranks must call this together."""
        mine = getattr(TrainerCallback, event)
        handles = any(getattr(type(callback), event) is not mine for callback in self.handler.callbacks)
        return self.ranks.any(handles, f"the check for callbacks with {event}") if self.decide else handles

    def call(self, event: str, **values: Any) -> None:
        """Call an event of all callbacks."""
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, **values)

    def agree(self, what: str) -> None:
        """Share the flags among all ranks. A flag is set if any rank has set it."""
        flags = [[getattr(self.control, flag) for flag in FLAGS]]
        if self.ranks.size > 1 and self.decide:
            flags = self.ranks.gather(flags[0], what)
        for flag, wanted in zip(FLAGS, zip(*flags, strict=True), strict=True):
            setattr(self.control, flag, any(wanted))
        if self.control.should_epoch_stop:
            raise ValueError(
                "a callback set should_epoch_stop, which is not supported; set should_training_stop instead"
            )

    def note_best(self, measured: dict[str, float]) -> None:
        """Update the best value of metric_for_best_model, as transformers does after an evaluation."""
        state, name = self.state, self.args.metric_for_best_model
        value = measured.get(self.args.config.metric_for_best_model, measured.get(name))
        if value is None or value != value:
            return
        best = state.best_metric
        if best is None or (value > best if self.args.greater_is_better else value < best):
            state.best_metric, state.best_global_step = value, state.global_step

    def note_saved(self, best: Mapping[str, Any] | None) -> None:
        """Record the path of the best checkpoint, if there is one."""
        if best is not None:
            self.state.best_model_checkpoint = f"{self.args.output_dir}/checkpoint-{best['step']}"

    def export(self) -> dict[str, Any]:
        """Return the state of stateful callbacks and the flags, for a checkpoint."""
        kept = {}
        for callback in self._stateful():
            kept.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: states[0] if len(states) == 1 else states for name, states in kept.items()} | (
            {CONTROL: self.control.state()} if self.handler.callbacks else {}
        )

    def restore(self, same: bool) -> None:
        """Restore the state of callbacks from the run's state. Several callbacks of one class are matched in order.

        The best value is forgotten unless metric_for_best_model and greater_is_better are the `same` as before.
        """
        if not same:
            self.state.best_metric = self.state.best_global_step = None
        kept = dict(self.state.stateful_callbacks)
        for flag, value in kept.pop(CONTROL, {}).get("args", {}).items():
            setattr(self.control, flag, value)
        kept = {name: list(states) if isinstance(states, list) else [states] for name, states in kept.items()}
        for callback in self._stateful():
            states = kept.get(type(callback).__name__)
            if states:
                for name, value in states.pop(0)["attributes"].items():
                    setattr(callback, name, value)

    def _stateful(self) -> Iterable[Any]:
        return [callback for callback in self.handler.callbacks if isinstance(callback, ExportableState)]
