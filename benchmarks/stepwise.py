"""Runs a TRL trainer one optimizer step at a time, to time it in turns with fastgrpo's."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.contestants import Entry


class Stepwise(TrainerCallback):
    """Runs a TRL trainer in a separate thread, one optimizer step per call.

    On a CPU, the memory measurement does not include the allocations of that thread.
    """

    def __init__(self):
        self.go, self.done, self.error = threading.Semaphore(0), threading.Semaphore(0), None
        self.ready = threading.Event()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the next call."""
        self.ready.set()
        self.go.acquire()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Signal the end of the step."""
        self.done.release()

    def start(self, trainer: Any) -> None:
        """Start the training, and return when it waits for the first call. This object must be its callback."""

        def train() -> None:
            try:
                trainer.train()
            except BaseException as error:
                self.error = error
                self.ready.set()
                self.done.release()

        threading.Thread(target=train, daemon=True).start()
        self.ready.wait()

    def __call__(self) -> None:
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise RuntimeError(f"TRL's trainer failed: {type(self.error).__name__}: {self.error}") from self.error


def make_trl(
    path: str, rewards: Callable[..., list[float]] | list, rows: list[dict[str, Any]],
    adapt: Callable[[Any], Any] | None = None, callbacks: Sequence[TrainerCallback] = (),
    tools: Sequence[Callable[..., str]] = (), **settings: Any,
) -> Any:  # fmt: skip
    """Create TRL's GRPOTrainer, changed by `adapt`. It does not stop, log or save unless `settings` say so."""
    import trl
    from datasets import Dataset

    defaults = {"seed": 0, "max_steps": 10_000, "logging_steps": 10_000}
    config = trl.GRPOConfig(report_to="none", save_strategy="no", disable_tqdm=True, **{**defaults, **settings})
    trainer = trl.GRPOTrainer(
        path, rewards, args=config, train_dataset=Dataset.from_list(rows), callbacks=list(callbacks),
        tools=[*tools] or None,
    )  # fmt: skip
    if adapt is not None:
        adapt(trainer)
    return trainer


def trl_trainer(*given: Any, **settings: Any) -> tuple[Stepwise, Any]:
    """Create TRL's trainer as `make_trl` does, and return a function that runs one step, and the trainer."""
    stepper = Stepwise()
    trainer = make_trl(*given, callbacks=[stepper], **settings)
    stepper.start(trainer)
    return stepper, trainer


def trl_entry(
    variant: str, path: str, reward: Callable[..., list[float]], rows: list[dict[str, Any]], **settings: Any
) -> Entry:
    """Create TRL's GRPOTrainer as a contestant, whose only variant runs one step."""
    return Entry({variant: trl_trainer(path, reward, rows, **settings)[0]})
