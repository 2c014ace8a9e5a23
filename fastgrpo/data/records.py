"""The records that cross stages: a `Prompt`, the `Sample`s that are drawn for it, and the `Batch` of an update.

A stage adds its results to a sample by `dataclasses.replace`, and changes no record in place. A batch packs the samples
of a micro-batch into one sequence of tokens without padding.

Shapes: T tokens of a completion, S samples of a batch, N its packed tokens (of prompts and completions), M its
completion tokens.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch

from fastgrpo.loss.inputs import to_device


class Stateful(Protocol):
    """A part of a run whose state a checkpoint keeps, in the form that torch.distributed.checkpoint takes."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and text in nested dicts and lists."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as it enters the rollout.

    Attributes:
        ids: Its token ids.
        prompt: What reward functions see: a string, or a list of messages.
        columns: The other columns of its data row, which reward functions get by name.
    """

    ids: list[int]
    prompt: str | list[dict]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One completion of a prompt, from the draw to its line in samples.jsonl. Per-token tensors are [T], T = len(ids).

    The rollout gives ids, log-probs and finish_reason; judging adds text and rewards, then advantages are added; an
    update adds the rest for the samples that it trains on.

    Attributes:
        prompt_ids: Token ids of the prompt.
        ids: [T] token ids of the completion, the stop token included.
        advantage: The factor of its policy gradient; where its tokens have factors of their own, their mean.
        logps: fp32 log-probs of the draws, in nats, under the full softmax at the sampling temperature.
        sampler_logps: fp32 log-probs under the distribution that was drawn from, which filters and penalties change.
        finish_reason: "stop" where a stop token ended it, "length" where it reached its limit.
        prompt: What reward functions see of the prompt: a string, or a list of messages.
        columns: The other columns of the prompt's data row, which reward functions get by name.
        content: What reward functions see: a string, or a list with one message where the prompt is a list.
        rewards: The verdict of each reward function by name; NaN where a function gave none.
        extras: Further columns of samples.jsonl, as reward functions logged them.
        steps: The step rewards of each function that logged some, by its name: pairs of the end of a step (the number
            of tokens up to there) and the step's reward.
        trained: Whether a step of GRPO trains on it; dynamic sampling draws groups that no step trains on.
        token_advantages: fp32 factor of each token, where step rewards made them; None where all have `advantage`.
        masked: Whether its tokens are left out of the loss.
        weights: fp32 weight w_n of each token over the whole update.
        old_logps: fp32 log-probs under the policy that drew it; None on a rollout's first update, whose ratio is 1.
        ref_logps: fp32 log-probs under the reference; None without one.
        counted: 1 for the tokens whose surrogate counts and 0 for the others; None where all of them count.
        entropy_weights: fp32 weight e_n of each token in the entropy bonus; None where it is that of the objective.
        ratios: fp32 ratio of each token's probability to that by which it was drawn, as the last update saw it; None
            where its tokens had none, as in the first update of a rollout.
        clipped: bool, the tokens whose ratio the last update clipped; None where there are no ratios.
    """

    prompt_ids: list[int]
    ids: list[int]
    advantage: float = 0.0
    logps: torch.Tensor | None = None
    sampler_logps: torch.Tensor | None = None
    finish_reason: str = "stop"
    prompt: str | list[dict] = ""
    columns: dict[str, Any] = field(default_factory=dict)
    content: str | list[dict] = ""
    rewards: dict[str, float] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    trained: bool = False
    token_advantages: torch.Tensor | None = None
    masked: bool = False
    weights: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    counted: torch.Tensor | None = None
    entropy_weights: torch.Tensor | None = None
    ratios: torch.Tensor | None = None
    clipped: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    @property
    def truncated(self) -> bool:
        """Whether the completion was cut off at its limit."""
        return self.finish_reason == "length"

    @property
    def informative(self) -> bool:
        """Whether it, or one of its tokens, has an advantage that is not 0."""
        return self.advantage != 0 if self.token_advantages is None else bool((self.token_advantages != 0).any())


def with_text(sample: Sample, prompt: Prompt, tokenizer: Any) -> Sample:
    """Add the text of a drawn sample, and what reward functions see of its prompt."""
    text = tokenizer.decode(sample.ids, skip_special_tokens=True)
    content = text if isinstance(prompt.prompt, str) else [{"role": "assistant", "content": text}]
    return dataclasses.replace(sample, prompt=prompt.prompt, columns=prompt.columns, content=content)


@dataclass(frozen=True)
class Batch:
    """A packed micro-batch on the device, with its tokens in the order that `PackedAttention` expects.

    Attributes:
        input_ids: [N] int64.
        position_ids: [N] int64.
        lengths: Tokens of each packed sequence, on the host; they add up to N.
        branches: The lengths in tokens of the branches of each prompt that several samples share, on the host.
        rows: [M] int64. Index among the N tokens of the hidden state that predicts each completion token. Samples that
            share a prompt share the state that predicts their first tokens.
        targets: [M] int64 completion tokens.
        cu_seqlens: [S+1] int64 on the host. Where each sample begins among the M completion tokens, and where the last
            one ends.
        advantages: [S] fp32, or [M] where tokens have advantages of their own, or the surrogates of some do not count.
        weights: [M] fp32 weights of the tokens in the objective, or None.
        entropy_weights: [M] fp32 weights of the tokens in the entropy bonus, or None.
        old_logps: [M] fp32 log-probs under the policy before the update, or None.
        ref_logps: [M] fp32 log-probs under the reference, or None.
        sampler_logps: [M] fp32 log-probs under the distribution that drew the tokens, or None.
        rollout_logps: [M] fp32 log-probs under the policy, as the rollout measured them, or None.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: list[int]
    branches: list[list[int]]
    rows: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor | None
    entropy_weights: torch.Tensor | None
    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor | None
    sampler_logps: torch.Tensor | None
    rollout_logps: torch.Tensor | None

    @classmethod
    def pack(cls, samples: Sequence[Sample], device: torch.device | str, share_prompt: bool = True) -> "Batch":
        """Pack samples side by side."""
        layout = _Packing(prompt_groups(samples, share_prompt))
        counts = [len(sample.ids) for sample in samples]

        def tensor(values, dtype=torch.int64):
            return to_device(torch.tensor(values, dtype=dtype), device)

        def joined(name):
            values = [getattr(sample, name) for sample in samples]
            return None if values[0] is None else to_device(torch.cat(values), device)

        advantages, counted = joined("token_advantages"), joined("counted")
        if advantages is None:
            advantages = tensor([sample.advantage for sample in samples], torch.float32)
            if counted is not None:
                advantages = advantages.repeat_interleave(tensor(counts), output_size=sum(counts))
        if counted is not None:
            advantages = advantages * counted
        return cls(
            input_ids=tensor(layout.ids),
            position_ids=tensor(layout.positions),
            lengths=layout.lengths,
            branches=layout.branches,
            rows=tensor(layout.rows),
            targets=tensor([token for sample in samples for token in sample.ids]),
            cu_seqlens=torch.tensor([0, *accumulate(counts)]),
            advantages=advantages,
            weights=joined("weights"),
            entropy_weights=joined("entropy_weights"),
            old_logps=joined("old_logps"),
            ref_logps=joined("ref_logps"),
            sampler_logps=joined("sampler_logps"),
            rollout_logps=joined("logps"),
        )


class _Packing:
    """The order of a batch's tokens, made from groups of samples that share a prompt.

    The hidden state at position p predicts the token at p + 1. The first completion token is therefore predicted by the
    state of the last prompt token, and the last completion token is no input, because it predicts nothing.
    """

    def __init__(self, groups):
        self.ids, self.positions, self.lengths = [], [], []
        shared = [i for i, group in enumerate(groups) if sum(len(s.ids) > 1 for s in group) > 1]
        self.branches = [[len(s.ids) - 1 for s in groups[i] if len(s.ids) > 1] for i in shared]
        rows = {}
        ends = {i: self._put(groups[i][0].prompt_ids, 0)[-1] for i in shared}
        for i in shared:
            prompt = len(groups[i][0].prompt_ids)
            rows[i] = [[ends[i], *self._put(sample.ids[:-1], prompt)] for sample in groups[i]]
        for i in set(range(len(groups))) - set(shared):
            # The group is one sequence, because at most one of its samples has inputs of its own.
            longest = max((sample.ids for sample in groups[i]), key=len)
            prompt = groups[i][0].prompt_ids
            inputs = self._put(prompt + longest[:-1], 0)[len(prompt) - 1 :]
            rows[i] = [inputs[: len(sample.ids)] for sample in groups[i]]
        self.rows = [row for i in range(len(groups)) for of_sample in rows[i] for row in of_sample]

    def _put(self, tokens, position):
        """Append a sequence that starts at this position; returns the indices of its tokens in the pack."""
        rows = range(len(self.ids), len(self.ids) + len(tokens))
        self.ids += tokens
        self.positions += range(position, position + len(tokens))
        if tokens:
            self.lengths.append(len(tokens))
        return rows


def prompt_groups(samples: Sequence[Sample], share_prompt: bool = True) -> list[list[Sample]]:
    """Split samples into runs of neighbours that have the same prompt."""
    groups = []
    for sample in samples:
        if share_prompt and groups and groups[-1][0].prompt_ids == sample.prompt_ids:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


@dataclass
class TrainerState:
    """How far a run has come. Reward functions get it as `trainer_state`.

    Attributes:
        global_step: Steps done.
        max_steps: Steps of the whole run.
        epoch: Passes over the training rows so far.
        max_completion_length: The limit of a completion, in tokens.
        num_tokens: Prompt and completion tokens drawn so far.
        evaluated_at: The step of the last evaluation, or None.
        accuracy_before: Held-out accuracy before the first step, or None.
        accuracy_after: Held-out accuracy of the last evaluation, or None.
        best_metric: The best value of metric_for_best_model so far, or None.
        best_global_step: The step at which it was measured, or None.
        best_model_checkpoint: The path of the checkpoint of that step, or None.
        stateful_callbacks: What callbacks have to keep, by the name of their class.
        log_history: The logged metrics, a dict for each line. A copy of the state is another list of the same dicts.
        logging_steps: Steps between two lines.
        eval_steps: Steps between two evaluations; 0 for none.
        save_steps: Steps between two checkpoints.
        num_train_epochs: Passes over the training rows that were asked for.
        is_world_process_zero: Whether this is rank 0.
        is_local_process_zero: The same.
    """

    global_step: int
    max_steps: int
    epoch: float
    max_completion_length: int
    num_tokens: int = 0
    evaluated_at: int | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    stateful_callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list, repr=False)
    logging_steps: int = 1
    eval_steps: int = 0
    save_steps: int = 0
    num_train_epochs: float = 0
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True

    def count(self, rows: int, tokens: int, of: int) -> None:
        """Add the rows and tokens of a step. `of` is the number of rows in an epoch."""
        self.num_tokens += tokens
        rows += round(self.epoch * of)  # in whole rows, so that no rounding adds up
        self.epoch = rows / of

    def __deepcopy__(self, memo: dict) -> "TrainerState":
        """Copy the state for a reward function. The history may have many thousand dicts, which are not copied."""
        return dataclasses.replace(self, log_history=list(self.log_history))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: how far the run is. Settings and the log are kept elsewhere."""
        return {name: getattr(self, name) for name in _PROGRESS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, except `max_steps`, which the settings of the resumed run decide."""
        for name in _PROGRESS:
            if name != "max_steps":
                setattr(self, name, state[name])


_PROGRESS = (
    "global_step", "max_steps", "epoch", "num_tokens", "evaluated_at", "accuracy_before", "accuracy_after",
    "best_metric", "best_global_step", "stateful_callbacks",
)  # fmt: skip
