"""Supervised fine-tuning on completions: `SFTTrainer`, and the warm start of a task's own model.

    L = -(1 / T) sum over the T completion tokens of an update of log pi(token)

Its gradient equals GRPO's at an advantage of 1 and a ratio of 1, with DAPO's normalization.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from fastgrpo.config.settings import SFTConfig
from fastgrpo.data.prompts import is_example, join_turns, to_examples
from fastgrpo.data.records import Sample
from fastgrpo.data.sources import Curriculum, Source
from fastgrpo.policy.fit import examples_of
from fastgrpo.policy.micro_batches import Dealer
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import Scoring, score
from fastgrpo.rewards import find_rewards, prm_options
from fastgrpo.rewards.call import Rewards, rewards_settings
from fastgrpo.run.curves import SUPERVISED_PANELS
from fastgrpo.run.health import MAX_SKIPPED
from fastgrpo.trainer.ahead import Ahead
from fastgrpo.trainer.grpo import GRPOTrainer
from fastgrpo.trainer.optim import MasterAdamW, make_schedule
from fastgrpo.trainer.update import Learner


class SFTTrainer(GRPOTrainer):
    """Trains a causal LM on the completions of rows, under TRL's names.

    Args:
        model: A folder, hub id or GGUF file, or a transformers causal LM, which is trained in place.
        args: The settings, or None for the defaults.
        train_dataset: Rows with a `prompt` and a `completion`, or with `messages`, or a `Source` of them (not a
            Curriculum). `train` validates all rows before the first step.
        eval_dataset: Held-out rows, or None for no evaluation. If the rows have completions or messages, their loss is
            measured. If there are reward functions, the rows' prompts are completed and judged.
        processing_class: The tokenizer, or None for the model's.
        reward_funcs: Reward functions for the evaluation, as in `GRPOTrainer`. None uses `args.reward_funcs`.
        callbacks: Callbacks of transformers, as instances or classes.
        peft_config: A `peft.LoraConfig`, instead of the settings of LoRA.

    Raises:
        ValueError: An argument or a setting is invalid. The message names it and the fix.
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
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        peft_config: Any = None,
    ):
        super().__init__(
            model, reward_funcs, args, train_dataset, eval_dataset, processing_class, callbacks=callbacks,
            peft_config=peft_config, panels=SUPERVISED_PANELS,
        )  # fmt: skip

    def _most_rows(self):
        return self.args.max_steps * self.args.batch_size if self.args.max_steps > 0 else None

    def _make_environments(self, tools, factory):
        return None

    def _make_rewards(self, reward_funcs, tokenizers):
        if isinstance(self.source, Curriculum):
            raise ValueError(
                "train_dataset is a Curriculum, which needs the accuracy of training steps, and supervised training "
                "has none; pass its rows"
            )
        args, reward_funcs = self.args, reward_funcs or list(self.args.reward_funcs)
        if not reward_funcs:
            return None
        how = args.template_kwargs, args.trust_remote_code, prm_options(args, reward_funcs)
        return Rewards(find_rewards(reward_funcs, None, *how), **rewards_settings(args))

    def _check_rows(self, train_rows):
        for _ in self._read(train_rows):
            pass
        self.examples = {id(rows): self._examples(rows) for rows in self.held_out.values()}
        if self.rewards is not None:
            self._check_prompts(train_rows.head(0))
        else:
            self.unmeasured = "no held-out completions and no reward functions: the evaluation measures nothing"

    def _examples(self, rows):
        """Return the examples in held-out rows; empty if the rows have none."""
        return list(self._read(rows)) if any(map(is_example, rows)) else []

    def _read(self, rows):
        how = self.tokenizer, self.policy, self.sampling.stop_token_ids, self._shows_bars, self.args.template_kwargs
        return examples_of(rows, *how)

    def _prepare(self):
        """Create no reference and no collector."""
        self.ahead = Ahead(self.engine)

    def _advice(self):
        return []

    def _own_parts(self):
        return {}

    def collect(self) -> tuple[list[Sample], dict[str, float]]:
        """Tokenize the rows of a step."""
        rows = self.source.take(self.args.batch_size)
        how = self.tokenizer, self.sampling.stop_token_ids, self.args.template_kwargs
        samples = [sample for row in rows for sample in join_turns(to_examples(row, *how))]
        self.state.count(len(rows), sum(map(len, samples)), of=len(self.source))
        return samples, {}

    def update(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """Train on the collected samples."""
        learning_rate = self.learner.learning_rate
        loss, norm = learn(self.policy, self.learner, samples)
        norm = norm.item()
        skipped = norm != norm
        values = {"learning_rate": learning_rate, "skipped_updates": float(skipped)}
        if not skipped:
            values |= {"loss": loss, "grad_norm": norm}
        return samples, values

    def _log_samples(self, step, samples):
        """Write no samples: they are in the training data."""

    def _held_out_loss(self, samples, prefix):
        return {}

    def _measure(self, rows, prefix):
        """Measure the loss of held-out completions, if any, and the accuracy if there are reward functions."""
        values, examples = {}, self.examples[id(rows)] if id(rows) in self.examples else self._examples(rows)
        if examples:
            values[f"{prefix}/loss"] = loss = mean_loss(self.policy, examples, self.learner.dealer)
            self.log.say(f"step {self.state.global_step}: held-out loss {loss:.4f}")
        if self.rewards is not None:
            return super()._measure(rows, prefix, values)
        if values:
            self._write(values)
        return values


MAX_TOKENS = 16384  # maximum tokens of a micro-batch in a warm start


def learn(policy: Policy, learner: Learner, samples: Sequence[Sample]) -> tuple[float, torch.Tensor]:
    """Run one update, and return the mean negative log-likelihood before it and the gradient norm before clipping.

    The first is in nats per completion token. The norm is NaN if the update was skipped.
    """
    tokens = sum(len(sample.drawn) for sample in samples)

    def loss_fn(_, batch):
        with learner.timer.stage("forward"):
            states = policy.completion_states(batch)
        with learner.timer.stage("loss"):
            return -policy.logps_of(states, batch.targets).sum() / tokens

    norm, loss = learner.step(samples, loss_fn)
    return loss.item(), norm


@torch.no_grad()
def mean_loss(policy: Policy, samples: Sequence[Sample], dealer: Dealer) -> float:
    """Measure the loss without training."""
    shares = dealer.shares(samples)
    mine, passes = [samples[i] for i in shares[dealer.ranks.rank]], dealer.agreed(samples, shares)
    dealer.meet("the passes of the held-out loss")
    logps = score(policy, mine, Scoring(1.0, dealer.max_tokens, dealer.share_prompt), passes)
    own = torch.cat(logps).double().sum().item() if logps else 0.0
    total = math.fsum(dealer.ranks.gather(own, "the held-out loss"))
    return -total / sum(len(sample.drawn) for sample in samples)


def sft(
    policy: Policy,
    examples: Sequence[Sample],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int = 0,
    on_step: Callable[[int, float], bool | None] | None = None,
) -> None:
    """Warm-start a policy on examples, with a linear decay of the learning rate to zero."""
    if not examples:
        raise ValueError("sft needs at least one example")
    optimizer = MasterAdamW(policy.module, learning_rate=learning_rate)
    schedule = make_schedule(optimizer, "linear", warmup_steps=0.05, total_steps=steps)
    learner = Learner(policy, optimizer, schedule, max_grad_norm=1.0, max_tokens=MAX_TOKENS)
    rng, queue, norms = random.Random(seed), [], []
    for step in range(1, steps + 1):
        while len(queue) < batch_size:
            queue += rng.sample(range(len(examples)), len(examples))
        chosen, queue = queue[:batch_size], queue[batch_size:]
        loss, norm = learn(policy, learner, [examples[i] for i in chosen])
        norms = [*norms, norm][-MAX_SKIPPED:]
        if step % MAX_SKIPPED == 0 and torch.stack(norms).isnan().all():
            raise ValueError(f"{MAX_SKIPPED} updates in a row were not finite and were skipped; lower learning_rate")
        if on_step is not None and on_step(step, loss):
            return
