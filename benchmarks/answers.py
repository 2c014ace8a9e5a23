"""Rows of the head as in training: a model's answers, with the hidden states that predict their tokens.

Shapes: S answers, N tokens of all of them, V vocabulary, D hidden.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.batches import Batch
from fastgrpo import group_advantages
from fastgrpo.data.prompts import to_prompt
from fastgrpo.data.records import Batch as Packed
from fastgrpo.data.records import Sample
from fastgrpo.policy.load import load_policy, stop_token_ids
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.tasks.gsm8k import sums, to_row

GROUP = 8  # answers to one prompt, as in fastgrpo/recipes/smollm2-135m-sums.yaml
AT_ONCE = 32  # answers in flight


class Work(NamedTuple):
    """A policy and its prompts."""

    policy: Policy
    prompts: list[list[int]]  # token ids
    stops: tuple[int, ...]  # tokens that end a completion
    max_tokens: int  # of a completion


class Answers(NamedTuple):
    """The rows of a model's answers."""

    batch: Batch  # all tokens of the answers, concatenated and all active; its `length` is that of the longest answer
    lengths: torch.Tensor  # [S] int64 tokens of each answer

    @property
    def places(self) -> torch.Tensor:
        """[N] int64. The index of each token after every answer is padded to the longest."""
        starts = torch.arange(len(self.lengths)) * self.batch.length
        first = self.lengths.cumsum(0) - self.lengths
        return torch.arange(int(self.lengths.sum())) + (starts - first).repeat_interleave(self.lengths)

    def padded(self) -> Batch:
        """Return the same tokens with every answer padded to the longest, for a head that needs sequences."""
        places, batch, size = self.places, self.batch, len(self.lengths) * self.batch.length

        def spread(values):
            return values.new_zeros(size, *values.shape[1:]).index_copy(0, places, values)

        advantages = batch.advantages[self.lengths.cumsum(0) - 1].repeat_interleave(batch.length)
        return batch._replace(
            hidden=spread(batch.hidden.detach()).requires_grad_(), targets=spread(batch.targets),
            advantages=advantages, old_logps=spread(batch.old_logps), mask=spread(batch.mask), rows=places,
        )  # fmt: skip


def load_work(model: str, problems: str | None, prompts: int, max_tokens: int) -> Work:
    """Load the model of a folder, and as many problems as `prompts`, in GSM8K's template with its worked problem.

    `problems` is a folder with GSM8K's test.jsonl, or None for the training sums of `fastgrpo.tasks.gsm8k`.
    """
    policy, tokenizer = load_policy(model, dtype="float32", device="cpu")
    if problems is None:
        rows = sums()[0][:prompts]
    else:
        lines = (Path(problems) / "test.jsonl").read_text().splitlines()[:prompts]
        rows = [json.loads(line) for line in lines]
    rows = [to_row(row, None, conversational=tokenizer.chat_template is not None) for row in rows]
    ids = [to_prompt(row, tokenizer).ids for row in rows]
    return Work(policy, ids, stop_token_ids(policy, tokenizer), max_tokens)


def draw(work: Work) -> Answers:
    """Draw `GROUP` answers to each prompt at temperature 1, and compute the hidden states that predict their tokens.

    Rewards are 1 or -1 at random, and advantages are standardized within groups. Old log-probs are those of the
    rollout. Every call draws the same answers.
    """
    engine = RolloutEngine(work.policy, max_num_seqs=AT_ONCE)
    sampling = SamplingParams(temperature=1.0, max_tokens=work.max_tokens, stop_token_ids=work.stops, seed=0)
    drawn = engine.generate(work.prompts, GROUP, sampling)
    rewards = torch.randint(2, (len(drawn),), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    advantages = group_advantages(rewards, GROUP).float()
    hidden, targets = [], []
    for i, prompt in enumerate(work.prompts):
        group = drawn[i * GROUP : (i + 1) * GROUP]
        packed = Packed.pack([Sample(prompt, rollout.ids, advantage=0.0) for rollout in group], work.policy.device)
        with torch.no_grad():
            hidden.append(work.policy.completion_states(packed))
        targets.append(packed.targets)
    lengths, targets = torch.tensor([len(rollout.ids) for rollout in drawn]), torch.cat(targets)
    batch = Batch(
        hidden=torch.cat(hidden).requires_grad_(),
        weight=work.policy.head.weight.detach().requires_grad_(),
        targets=targets,
        advantages=advantages.repeat_interleave(lengths),
        old_logps=torch.cat([rollout.logps for rollout in drawn]),
        mask=torch.ones(len(targets), dtype=torch.bool),
        rows=torch.arange(len(targets)),
        length=int(lengths.max()),
    )
    return Answers(batch, lengths)
