"""One optimizer step of a TRL trainer at a time, so that it can take turns with fastgrpo's."""

import threading
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.contestants import Entry


class Stepwise(TrainerCallback):
    """Lets a TRL trainer, which runs in a thread of its own, take one optimizer step at each call.

    On a CPU, the memory measurement does not see what that thread allocates.
    """

    def __init__(self):
        self.go, self.done, self.error = threading.Semaphore(0), threading.Semaphore(0), None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait until a step is called for.

        Args:
            args: Settings of the trainer.
            state: Where the trainer is.
            control: What the trainer does next.
            kwargs: Objects of the trainer.
        """
        self.go.acquire()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell that the step is done.

        Args:
            args: Settings of the trainer.
            state: Where the trainer is.
            control: What the trainer does next.
            kwargs: Objects of the trainer.
        """
        self.done.release()

    def start(self, trainer: Any) -> None:
        """Start the training, which waits for the first call.

        Args:
            trainer: TRL's GRPOTrainer, with this object among its callbacks.
        """

        def train() -> None:
            try:
                trainer.train()
            except BaseException as error:
                self.error = error
                self.done.release()

        threading.Thread(target=train, daemon=True).start()

    def __call__(self) -> None:
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise RuntimeError("TRL's trainer failed") from self.error


def trl_entry(
    variant: str, path: str, reward: Callable[..., list[float]], rows: list[dict[str, Any]], **settings: Any
) -> Entry:
    """Make TRL's GRPOTrainer as a contestant.

    Args:
        variant: What its only variant, which takes one step, is called.
        path: Folder of the model.
        reward: The reward function.
        rows: What it trains on.
        settings: Settings of TRL's GRPOConfig beside those that keep it from stopping, logging and saving.
    """
    import trl
    from datasets import Dataset

    config = trl.GRPOConfig(
        max_steps=10_000, report_to="none", save_strategy="no", logging_steps=10_000, disable_tqdm=True, seed=0,
        **settings,
    )  # fmt: skip
    stepper = Stepwise()
    trainer = trl.GRPOTrainer(path, reward, args=config, train_dataset=Dataset.from_list(rows), callbacks=[stepper])
    stepper.start(trainer)
    return Entry({variant: stepper})
