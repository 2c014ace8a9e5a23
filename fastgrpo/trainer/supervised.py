"""Supervised fine-tuning on completions, with the run folder, checkpoints and evaluations of every other training."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.config.supervised import SFTConfig
from fastgrpo.data.examples import is_example, to_examples
from fastgrpo.data.records import Step
from fastgrpo.data.sources import Curriculum, Source
from fastgrpo.policy.fit import examples_of
from fastgrpo.policy.load import stop_token_ids
from fastgrpo.run.curves import SUPERVISED_PANELS, Panel
from fastgrpo.run.log import RunLog
from fastgrpo.step.supervised import learn, mean_loss
from fastgrpo.trainer.base import Trainer


class SFTTrainer(Trainer):
    """Trains a causal LM on the completions of rows, under TRL's names.

    Args:
        model: A folder, hub id or GGUF file, or a transformers causal LM, which is trained in place.
        args: The settings; None for the defaults.
        train_dataset: Rows with a `prompt` and a `completion`, or with `messages`, or a `Source` of them that is no
            Curriculum. All rows are checked here.
        eval_dataset: Held-out rows, or None for no evaluation. Their loss is measured where they have completions or
            messages, and their prompts are completed and judged where there are reward functions.
        processing_class: The tokenizer; None loads the model's.
        reward_funcs: Reward functions for the evaluation, as `GRPOTrainer` takes them; none by default.
        log: A `RunLog` that has claimed its folder already. None makes one from args.
        panels: What the picture of the run shows.

    Raises:
        ValueError: An argument or a setting cannot be used; the message names it and the remedy.
    """

    config_class, title = SFTConfig, "SFT"
    shown: ClassVar = {"loss": "loss", "learning rate": "learning_rate"}
    needed_rows = "rows with a `prompt` and a `completion`, or with `messages`"

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        args: SFTConfig | None = None,
        train_dataset: Source | Iterable[dict] | None = None,
        eval_dataset: Iterable[dict] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_funcs: Callable | Sequence[Callable] | None = None,
        log: RunLog | None = None,
        panels: Sequence[Panel] = SUPERVISED_PANELS,
    ):
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, log, panels)

    def _make_rewards(self, reward_funcs):
        if isinstance(self.source, Curriculum):
            raise ValueError(
                "train_dataset is a Curriculum, whose levels end at an accuracy in training, and supervised training "
                "measures none; pass its rows"
            )
        given = callable(reward_funcs) or reward_funcs
        return super()._make_rewards(reward_funcs) if given else None

    def _check_rows(self, train_rows):
        self.stops = stop_token_ids(self.policy, self.tokenizer)
        for _ in self._read(train_rows):
            pass
        self.examples = {id(rows): self._examples(rows) for rows in self.held_out.values()}
        if self.rewards is not None:
            super()._check_rows(train_rows.head(0))
        else:
            self.unmeasured = "no held-out completions and no reward functions: nothing is measured on held-out rows"

    def _examples(self, rows):
        """Return the completions of held-out rows; none where no row has any."""
        if not any(map(is_example, rows)):
            return []
        return list(self._read(rows))

    def _read(self, rows):
        how = self.tokenizer, self.policy, self.stops, self._shows_bars, self.args.template_kwargs
        return examples_of(rows, *how)

    def _prepare(self):
        """Nothing is needed beyond what every training has."""

    def _step(self, step, logged):
        rows = self.source.take(self.args.batch_size)
        how = self.tokenizer, self.stops, self.args.template_kwargs
        examples = [example for row in rows for example in to_examples(row, *how)]
        learning_rate = self.updater.learning_rate
        learned = learn(self.policy, self.updater, examples)
        norm = learned.norm.item()
        skipped = norm != norm
        values = {"learning_rate": learning_rate, "skipped_updates": float(skipped)}
        if not skipped:
            values |= {"loss": learned.loss, "grad_norm": norm}
        return Step(values, [norm], len(rows), learned.tokens, sum(map(len, examples)))

    def _measure(self, rows, prefix):
        """Measure the loss of held-out completions and the accuracy on held-out prompts, as far as there are any."""
        values, examples = {}, self.examples[id(rows)] if id(rows) in self.examples else self._examples(rows)
        if examples:
            values[f"{prefix}/loss"] = loss = mean_loss(self.policy, examples, self.updater.dealer)
            self.log.say(f"step {self.state.global_step}: held-out loss {loss:.4f}")
        if self.rewards is not None:
            return super()._measure(rows, prefix, values)
        if values:
            self._write(values)
        return values
