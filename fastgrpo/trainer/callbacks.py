"""The callbacks of transformers in our loop: events, what they decide, and what a checkpoint keeps of them.

The order of events is that of transformers: on_step_begin, the step, on_step_end, on_log, on_evaluate, on_save. A step
is a rollout with all of its updates. Events of single updates and of batches in an evaluation do not exist here.

On several ranks every rank calls its callbacks, and what one of them decides holds for all.
"""

import logging
from collections.abc import Iterable, Sequence
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
CONTROL = "TrainerControl"  # the name under which a checkpoint has the flags, as transformers' have


class Arguments:
    """The settings of a run as callbacks read them: ours, and names of transformers that follow from them."""

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
        if metric is not None and metric.startswith("eval/"):
            metric = next(iter(evaluated({metric: 0.0})))
        self.metric_for_best_model = metric

    def __getattr__(self, name: str) -> Any:
        """Read a setting. Raises AttributeError where there is none of that name."""
        if name.startswith("__") or name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)


class Callbacks:
    """Calls the callbacks of a run, by transformers' own handler.

    Attributes:
        handler: transformers' handler, whose callbacks can be added to and removed from.
        control: What the callbacks have decided.
        args: The settings as callbacks read them; they are known once the folder of the run is claimed.
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
        # The handler warns where nothing decides when to log, evaluate and save. Our loop does.
        self.handler = CallbackHandler([DefaultFlowCallback], model, tokenizer, optimizer, schedule)
        self.handler.pop_callback(DefaultFlowCallback)
        for callback in callbacks or ():
            self.add(callback)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, and warn of events in it that never happen here."""
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise ValueError(f"callbacks: {kind.__name__} is no transformers.TrainerCallback; inherit from it")
        never = [name for name in NEVER if getattr(kind, name) is not getattr(TrainerCallback, name)]
        if never:
            logger.warning("%s of %s is never called: a step is a whole rollout here", ", ".join(never), kind.__name__)
        self.handler.add_callback(callback)

    def begin(self) -> None:
        """Begin the training, and find out whether any rank has callbacks, whose decisions all must hear of then."""
        metric = self.args.metric_for_best_model
        stops = any(isinstance(callback, EarlyStoppingCallback) for callback in self.handler.callbacks)
        if stops and metric is not None and not metric.startswith("eval_"):
            raise ValueError(
                f"metric_for_best_model={metric!r} is a metric of training here, and EarlyStoppingCallback would "
                f"follow eval_{metric}; set metric_for_best_model='eval_{metric}'"
            )
        self.decide = self.ranks.any(bool(self.handler.callbacks), "whether there are callbacks")
        self.call("on_train_begin")

    def any_handles(self, event: str) -> bool:
        """Tell whether any callback of any rank has something to do at an event. All ranks ask this together."""
        mine = getattr(TrainerCallback, event)
        handles = any(getattr(type(callback), event) is not mine for callback in self.handler.callbacks)
        return self.ranks.any(handles, f"whether a callback has an {event}") if self.decide else handles

    def call(self, event: str, **values: Any) -> None:
        """Call an event of all callbacks."""
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, **values)

    def agree(self, what: str) -> None:
        """Make the decisions of every rank those of all."""
        flags = [[getattr(self.control, flag) for flag in FLAGS]]
        if self.ranks.size > 1 and self.decide:
            flags = self.ranks.gather(flags[0], what)
        for flag, wanted in zip(FLAGS, zip(*flags, strict=True), strict=True):
            setattr(self.control, flag, any(wanted))
        if self.control.should_epoch_stop:
            raise ValueError(
                "a callback set should_epoch_stop, and rows are drawn without an end here; set should_training_stop"
            )

    def note_best(self, measured: dict[str, float]) -> None:
        """Note the best value of metric_for_best_model, as transformers does after an evaluation."""
        state, name = self.state, self.args.metric_for_best_model
        value = measured.get(name)
        if value is None or value != value:
            return
        best = state.best_metric
        if best is None or (value > best if self.args.greater_is_better else value < best):
            state.best_metric, state.best_global_step = value, state.global_step

    def note_saved(self) -> None:
        """Note the checkpoint of this step as the best one where the best value was measured at it."""
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = f"{self.args.output_dir}/checkpoint-{self.state.global_step}"

    def export(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the callbacks: the state of those that have one, and the decisions."""
        kept = {}
        for callback in self._stateful():
            kept.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: states[0] if len(states) == 1 else states for name, states in kept.items()} | (
            {CONTROL: self.control.state()} if self.handler.callbacks else {}
        )

    def restore(self) -> None:
        """Give callbacks the state that the run's state has for them, one after the other where a class has several."""
        kept = dict(self.state.stateful_callbacks)
        for flag, value in kept.pop(CONTROL, {}).get("args", {}).items():
            setattr(self.control, flag, value)
        kept = {name: list(states) if isinstance(states, list) else [states] for name, states in kept.items()}
        for callback in self._stateful():
            states = kept.get(type(callback).__name__)
            if states:
                for name, value in states.pop(0)["attributes"].items():
                    setattr(callback, name, value)
        best = Path(self.args.output_dir) / f"checkpoint-{self.state.best_global_step}"
        if best.is_dir():
            self.state.best_model_checkpoint = str(best)

    def _stateful(self) -> Iterable[Any]:
        return [callback for callback in self.handler.callbacks if isinstance(callback, ExportableState)]
