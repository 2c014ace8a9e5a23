"""Judging on several ranks: each judges the completions that it drew, and all of them get all completions."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from fastgrpo.data.prompts import to_completion
from fastgrpo.data.records import Completion, Prompt, Rollout, TrainerState
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rewards.call import Judged, Rewards


class Judging:
    """Judges groups of completions as they come, where other processes can, and gathers what all ranks drew.

    A reward function that runs in this process sees the completions of its own rank in one call.
    """

    def __init__(
        self,
        rewards: Rewards,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        trainer_state: TrainerState | None = None,
        ranks: Ranks = ALONE,
    ):
        self.rewards, self.prompts, self.tokenizer, self.state, self.ranks = (
            rewards, prompts, tokenizer, trainer_state, ranks,
        )  # fmt: skip
        self.columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns)  # those of all ranks
        self.groups, self.begun = {}, {}

    def add(self, i: int, rollouts: Sequence[Rollout]) -> None:
        """Take what this rank drew for a prompt, and begin to judge it."""
        self.groups[i] = group = [to_completion(self.prompts[i], rollout, self.tokenizer) for rollout in rollouts]
        self.begun[i] = self.rewards.begin(group, self.state, self.columns, i)

    def result(self, allow_none: bool = False) -> Judged:
        """Wait for the verdicts, and gather those of all ranks."""
        mine = sorted(self.groups)
        completions, begun = [completion for i in mine for completion in self.groups[i]], defaultdict(list)
        for i in mine:
            for name, calls in self.begun[i].items():
                begun[name] += calls
        judged = Judged([], Counter(), {})
        if completions:
            judged = self.rewards(completions, self.state, allow_none or self.ranks.size > 1, self.columns, begun)
        if self.ranks.size == 1:
            return judged
        packed = _pack(judged, {i: len(self.groups[i]) for i in mine})
        groups, errors, timeouts, logged = {}, Counter(), Counter(), defaultdict(list)
        for other in self.ranks.gather(packed, "the completions that the ranks drew"):
            groups |= _unpacked(other, self.prompts)
            errors += other.errors
            timeouts += other.timeouts
            for name, values in other.logged.items():
                logged[name] += values
        completions = list(chain.from_iterable(group for _, group in sorted(groups.items())))
        if not allow_none and not timeouts:
            self.rewards.refuse_none(completions)
        return Judged(completions, errors, dict(logged), timeouts)


def judge_together(
    rewards: Rewards,
    drawn: Mapping[int, Sequence[Rollout]],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    trainer_state: TrainerState | None = None,
    *,
    ranks: Ranks = ALONE,
    allow_none: bool = False,
) -> Judged:
    """Judge what this rank drew, and gather what all ranks drew."""
    judging = Judging(rewards, prompts, tokenizer, trainer_state, ranks)
    for i, rollouts in drawn.items():
        judging.add(i, rollouts)
    return judging.result(allow_none)


class _Packed(NamedTuple):
    """The judged completions of a rank, with their tokens in one tensor.

    Attributes:
        groups: How many completions of each prompt there are, by the index of the prompt.
        lengths: Tokens of each completion.
        ids: [N] int32 tokens of all completions.
        logps: [N] fp32.
        kept: [N] fp32, or None where no filter was on.
        rest: What else is known of each completion: finish reason, content, rewards, extras, steps.
        errors: As in `Judged`.
        logged: As in `Judged`.
        timeouts: As in `Judged`.
    """

    groups: dict[int, int]
    lengths: list[int]
    ids: torch.Tensor
    logps: torch.Tensor
    kept: torch.Tensor | None
    rest: list[tuple]
    errors: Counter
    logged: dict[str, list[float]]
    timeouts: Counter


def _pack(judged, groups):
    rollouts = [completion.rollout for completion in judged.completions]
    joined = {
        name: torch.cat([getattr(rollout, name) for rollout in rollouts])
        for name in ("logps", "kept")
        if rollouts and getattr(rollouts[0], name) is not None
    }
    return _Packed(
        groups,
        [len(rollout.ids) for rollout in rollouts],
        torch.tensor(list(chain.from_iterable(rollout.ids for rollout in rollouts)), dtype=torch.int32),
        joined.get("logps"),
        joined.get("kept"),
        [(c.rollout.finish_reason, c.content, c.rewards, c.extras, c.steps) for c in judged.completions],
        judged.errors,
        judged.logged,
        judged.timeouts,
    )


def _unpacked(packed, prompts) -> dict[int, list[Completion]]:
    """Return the completions of a rank by the index of their prompt."""
    ids, spans = packed.ids.tolist(), pairwise(accumulate(packed.lengths, initial=0))
    which = chain.from_iterable([i] * count for i, count in packed.groups.items())
    groups = {i: [] for i in packed.groups}
    for i, (start, end), (reason, content, *verdicts) in zip(which, spans, packed.rest, strict=True):
        kept = None if packed.kept is None else packed.kept[start:end]
        rollout = Rollout(ids[start:end], packed.logps[start:end], reason, kept)
        groups[i].append(Completion(prompts[i], rollout, content, *verdicts))
    return groups
