"""Supervised fine-tuning on completions, with the run folder, checkpoints and evaluations of every other training.

Supervised training on completions, through the head that GRPO trains through.

    L = -(1 / T) sum over the T completion tokens of an update of log pi(token)

This is the policy gradient with a weight of 1 for every token: its gradient is that of GRPO's loss at an advantage of
1, a ratio of 1, and DAPO's normalization.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.config.settings import SFTConfig
from fastgrpo.data.examples import Example, is_example, to_examples
from fastgrpo.data.records import Sample, Step
from fastgrpo.data.sources import Curriculum, Source
from fastgrpo.policy.batch import Dealer
from fastgrpo.policy.fit import examples_of
from fastgrpo.policy.load import stop_token_ids
from fastgrpo.policy.model import Policy
from fastgrpo.policy.reference import Scoring, score
from fastgrpo.run.curves import SUPERVISED_PANELS, Panel
from fastgrpo.run.health import MAX_SKIPPED
from fastgrpo.run.log import RunLog
from fastgrpo.trainer.base import Trainer
from fastgrpo.trainer.optim import MasterAdamW, make_schedule
from fastgrpo.trainer.update import Updater


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


MAX_TOKENS = 16384  # largest number of tokens of a micro-batch of a warm start


@dataclass(frozen=True)
class Learned:
    """What one supervised update did.

    Attributes:
        loss: The mean negative log-likelihood of the completion tokens before the update, in nats.
        norm: The gradient norm before clipping, a scalar tensor; NaN where the update was skipped.
        tokens: How many completion tokens were learned.
    """

    loss: float
    norm: torch.Tensor
    tokens: int


def learn(policy: Policy, updater: Updater, examples: Sequence[Example]) -> Learned:
    """Make one update on some examples."""
    samples = _samples(examples)
    tokens = sum(len(sample.completion_ids) for sample in samples)

    def loss_fn(_, batch):
        with updater.timer.stage("forward"):
            states = policy.completion_states(batch)
        with updater.timer.stage("loss"):
            return -policy.logps_of(states, batch.targets).sum() / tokens

    done = updater.step(samples, loss_fn)
    return Learned(done.loss.item(), done.norm, tokens)


@torch.no_grad()
def mean_loss(policy: Policy, examples: Sequence[Example], dealer: Dealer) -> float:
    """Measure the loss on examples that are not learned."""
    samples = _samples(examples)
    shares = dealer.shares(samples)
    mine, passes = [samples[i] for i in shares[dealer.ranks.rank]], dealer.agreed(samples, shares)
    dealer.meet("the passes of the held-out loss")
    logps = score(policy, mine, Scoring(1.0, dealer.max_tokens, dealer.share_prompt), passes)
    own = torch.cat(logps).double().sum().item() if logps else 0.0
    total = math.fsum(dealer.ranks.gather(own, "the held-out loss"))
    return -total / sum(len(sample.completion_ids) for sample in samples)


def _samples(examples):
    """Make the samples that a micro-batch is packed from."""
    return [Sample(example.prompt_ids, example.completion_ids, advantage=1.0) for example in examples]


def sft(
    policy: Policy,
    examples: Sequence[Example],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int = 0,
    max_grad_norm: float = 1.0,
    on_step: Callable[[int, float], bool | None] | None = None,
) -> None:
    """Warm-start a policy: learn examples, with a linear decay of the learning rate to zero."""
    if not examples:
        raise ValueError("sft needs at least one example")
    optimizer = MasterAdamW(policy.module, learning_rate=learning_rate)
    schedule = make_schedule(optimizer, "linear", warmup_steps=0.05, total_steps=steps)
    updater = Updater(policy, optimizer, schedule, max_grad_norm=max_grad_norm, max_tokens=MAX_TOKENS)
    rng, queue, norms = random.Random(seed), [], []
    for step in range(1, steps + 1):
        while len(queue) < batch_size:
            queue += rng.sample(range(len(examples)), len(examples))
        chosen, queue = queue[:batch_size], queue[batch_size:]
        learned = learn(policy, updater, [examples[i] for i in chosen])
        norms = [*norms, learned.norm][-MAX_SKIPPED:]
        if step % MAX_SKIPPED == 0 and torch.stack(norms).isnan().all():
            raise ValueError(f"{MAX_SKIPPED} updates in a row were not finite, and were skipped; lower learning_rate")
        if on_step is not None and on_step(step, learned.loss):
            return
