"""The records passed between stages: a `Prompt`, the `Sample`s drawn for it, and the `Batch` of an update.

A stage adds its results to a sample with `Sample.replace`; records are never changed in place. A batch packs the
samples of a micro-batch into one sequence of tokens without padding.

A completion with tools has several turns: the model draws tokens up to a stop token, the answers of its tools are
appended, and the next turn begins. `Sample.tool_mask` marks the drawn tokens. Answers are inputs only: they have no
log-prob, no advantage and no weight.

Shapes: T tokens of a completion, D of them drawn, S samples of a batch, N its packed tokens (of prompts and
completions), M its drawn tokens.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, compress
from typing import Any, Protocol

import torch

from fastgrpo.loss.inputs import to_device


class Stateful(Protocol):
    """A component whose state is saved in checkpoints, with the interface of torch.distributed.checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and strings in nested dicts and lists."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt for the rollout: one for all completions of a row or, with tools, one for each.

    Attributes:
        ids: Token ids.
        prompt: The prompt as reward functions get it: a string, or a list of messages.
        columns: The other columns of the data row, which reward functions get by name.
        dialogue: Answers the turns of the completion, or None without tools.
    """

    ids: list[int]
    prompt: str | list[dict]
    columns: dict[str, Any] = field(default_factory=dict)
    dialogue: "Dialogue | None" = None


class StopReason(StrEnum):
    """Why a completion ended. `fastgrpo.tools.dialogue` states the order in which the reasons are checked."""

    LENGTH = "length"  # reached max_completion_length; or the answer of a tool would have
    CONTEXT = "context"  # reached the length limit of the model; or the answer of a tool would have
    PARSE_ERROR = "parse_error"  # the turn begins a tool call that cannot be parsed
    STOP = "stop"  # a stop token after a turn without tool calls
    MAX_TURNS = "max_turns"  # calls a tool in the last turn that is allowed
    TOOL_TIMEOUT = "tool_timeout"  # a tool did not answer in time
    ENV_ERROR = "env_error"  # the environment failed
    ENV_DONE = "env_done"  # the environment is done
    ABORTED = "aborted"  # dropped before its end


@dataclass(frozen=True)
class Turn:
    """What follows a drawn turn: tokens to append before the next draw, or the reason why the completion ends."""

    ids: list[int] = field(default_factory=list)
    reason: StopReason | None = None


class Dialogue(Protocol):
    """One completion with tools. The rollout passes it each drawn turn that ends with a stop token."""

    quick: bool  # whether the rollout waits a moment for the answer instead of decoding other completions first
    prompt: list[dict]
    calls: list[dict]  # the calls of tools, as in samples.jsonl
    environment: Any

    def answer(self, ids: list[int], room: int) -> "Future[Turn]":
        """Begin to answer the turn `ids`, with its stop token, and return at once.

        The answer has at most `room` tokens, so that one more can be drawn.
        """

    def close(self, reason: StopReason) -> None:
        """Note why the completion ended, or that it was aborted."""

    def transcript(self, ids: list[int]) -> list[dict]:
        """Return the messages of the completion with these tokens."""


@dataclass(frozen=True)
class Sample:
    """One completion of a prompt, from the draw to its line in samples.jsonl. Per-token tensors are [D].

    The rollout sets ids, log-probs and finish_reason. Rewards add text and rewards, then advantages are added. An
    update adds the rest for the samples that it trains on.

    Attributes:
        prompt_ids: Token ids of the prompt.
        ids: [T] token ids of the completion, including stop tokens and the answers of tools.
        tool_mask: [T] 1 for drawn tokens, 0 for answers of tools; None if all tokens were drawn. Named as in TRL.
        dialogue: The turns of a completion with tools, or None.
        advantage: The advantage, or the mean of `token_advantages`.
        logps: fp32 log-probs of the drawn tokens, in nats, under the full softmax at the sampling temperature.
        sampler_logps: fp32 log-probs under the sampling distribution, after filters and penalties.
        versions: int64 number of training steps of the weights that drew each token; None means the current weights.
        finish_reason: A `StopReason`.
        prompt: The prompt as reward functions get it: a string, or a list of messages.
        columns: The other columns of the prompt's data row, which reward functions get by name.
        content: The completion as reward functions get it: a string, or a list of one message if the prompt is a list.
        rewards: Reward of each reward function by name; NaN if it returned None.
        extras: Further columns of samples.jsonl, logged by reward functions.
        steps: Step rewards by the name of the function that logged them: pairs (end, reward), where end is the number
            of tokens of `ids` up to the end of the step.
        trained: Whether a step of GRPO trains on it. Dynamic sampling also draws groups that no step trains on.
        token_advantages: fp32 advantage of each token, from step rewards; None if all tokens have `advantage`.
        masked: Whether its tokens are excluded from the loss.
        weights: fp32 weight w_n of each token over the whole update.
        old_logps: fp32 log-probs under the policy that drew it; None in a rollout's first update, whose ratio is 1.
        ref_logps: fp32 log-probs under the reference, or None without a reference.
        counted: 1 for tokens whose surrogate is in the loss, 0 for the others; None if all are in the loss.
        entropy_weights: fp32 weight e_n of each token in the entropy bonus; None for the objective's own weight.
        ratios: fp32 ratio of each token in the last update: its probability divided by the one at its draw. None
            without ratios, as in a rollout's first update.
        clipped: bool, the tokens whose ratio the last update clipped; None without ratios.
    """

    prompt_ids: list[int]
    ids: list[int]
    advantage: float = 0.0
    tool_mask: list[int] | None = None
    logps: torch.Tensor | None = None
    sampler_logps: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    finish_reason: str = StopReason.STOP
    dialogue: Dialogue | None = None
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

    def replace(self, **changes: Any) -> "Sample":
        """Return a copy with other values of some fields, faster than `dataclasses.replace`."""
        copy = object.__new__(Sample)
        vars(copy).update(vars(self), **changes)
        return copy

    @property
    def drawn(self) -> list[int]:
        """The drawn tokens [D] of `ids`."""
        return self.ids if self.tool_mask is None else list(compress(self.ids, self.tool_mask))

    @property
    def truncated(self) -> bool:
        """Whether the completion reached a length limit."""
        return self.finish_reason in (StopReason.LENGTH, StopReason.CONTEXT)

    @property
    def informative(self) -> bool:
        """Whether its advantage, or the advantage of one of its tokens, is not 0."""
        return self.advantage != 0 if self.token_advantages is None else bool((self.token_advantages != 0).any())


def with_text(sample: Sample, prompt: Prompt, tokenizer: Any) -> Sample:
    """Add the text of a drawn sample, and the prompt and columns that reward functions get."""
    if sample.dialogue is not None:
        messages, content = sample.dialogue.prompt, sample.dialogue.transcript(sample.ids)
        return sample.replace(prompt=messages, columns=prompt.columns, content=content)
    text = tokenizer.decode(sample.ids, skip_special_tokens=True)
    content = text if isinstance(prompt.prompt, str) else [{"role": "assistant", "content": text}]
    columns = prompt.columns | sample.columns  # of `rollout_func`
    return sample.replace(prompt=prompt.prompt, columns=columns, content=content)


@dataclass(frozen=True)
class Batch:
    """A packed micro-batch on the device: S samples with M drawn tokens, as N inputs in the order of `PackedAttention`.

    Floating point tensors are fp32.
    """

    input_ids: torch.Tensor  # [N] int64
    position_ids: torch.Tensor  # [N] int64
    lengths: list[int]  # tokens of each packed sequence; they add up to N
    branches: list[list[int]]  # for each prompt that several samples share, the lengths of its branches in tokens
    # [M] int64: among the N tokens, the index of the hidden state that predicts each drawn token. Samples that share a
    # prompt share the state that predicts their first tokens.
    rows: torch.Tensor
    targets: torch.Tensor  # [M] int64 drawn tokens
    cu_seqlens: torch.Tensor  # [S+1] int64 on the host: the start of each sample among the M tokens, and the last end
    advantages: torch.Tensor  # [S], or [M] if they differ between the tokens of a sample
    weights: torch.Tensor | None  # [M], of the tokens in the objective
    entropy_weights: torch.Tensor | None  # [M], of the tokens in the entropy bonus
    old_logps: torch.Tensor | None  # [M], under the policy before the update
    ref_logps: torch.Tensor | None  # [M], under the reference
    sampler_logps: torch.Tensor | None  # [M], under the sampling distribution
    rollout_logps: torch.Tensor | None  # [M], under the policy, computed by the rollout

    @classmethod
    def pack(cls, samples: Sequence[Sample], device: torch.device | str, share_prompt: bool = True) -> "Batch":
        """Pack samples."""
        layout = _Packing(prompt_groups(samples, share_prompt))
        targets = [sample.drawn for sample in samples]
        counts = [len(drawn) for drawn in targets]

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
            targets=tensor([token for drawn in targets for token in drawn]),
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
    """The order of a batch's tokens, from groups of samples that share a prompt.

    The hidden state at position p predicts the token at p + 1. So the last prompt token predicts the first completion
    token, and the last completion token is not an input.
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
            # At most one sample of the group has completion inputs, so the group is one sequence.
            longest = max((sample.ids for sample in groups[i]), key=len)
            prompt = groups[i][0].prompt_ids
            inputs = self._put(prompt + longest[:-1], 0)[len(prompt) - 1 :]
            rows[i] = [inputs[: len(sample.ids)] for sample in groups[i]]
        self.rows = []
        for i, group in enumerate(groups):
            for sample, of_sample in zip(group, rows[i], strict=True):
                self.rows += of_sample if sample.tool_mask is None else compress(of_sample, sample.tool_mask)

    def _put(self, tokens, position):
        """Append a sequence that starts at this position, and return the indices of its tokens in the pack."""
        rows = range(len(self.ids), len(self.ids) + len(tokens))
        self.ids += tokens
        self.positions += range(position, position + len(tokens))
        if tokens:
            self.lengths.append(len(tokens))
        return rows


def prompt_groups(samples: Sequence[Sample], share_prompt: bool = True) -> list[list[Sample]]:
    """Group adjacent samples with the same prompt."""
    groups = []
    for sample in samples:
        if share_prompt and groups and groups[-1][0].prompt_ids == sample.prompt_ids:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


@dataclass
class TrainerState:
    """Progress of a run. Reward functions get it as `trainer_state`.

    Attributes:
        global_step: Steps done.
        max_steps: Steps of the whole run.
        epoch: Passes over the training rows so far.
        max_completion_length: Length limit of a completion, in tokens.
        num_tokens: Prompt and completion tokens drawn so far.
        evaluated_at: The step of the last evaluation, or None.
        accuracy_before: Held-out accuracy before the first step, or None.
        accuracy_after: Held-out accuracy of the last evaluation, or None.
        best_metric: The best value of metric_for_best_model so far, or None.
        best_global_step: The step at which it was measured, or None.
        best_model_checkpoint: The path of the best checkpoint, or None. Other steps may have had a better value.
        stateful_callbacks: State of callbacks, by the name of their class.
        log_history: The logged metrics, one dict per line. A copy of the state has a new list of the same dicts.
        logging_steps: Steps between two lines.
        eval_steps: Steps between two evaluations; 0 for none.
        save_steps: Steps between two checkpoints.
        num_train_epochs: Passes over the training rows in the whole run.
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
    # Not fields: transformers' callbacks read them, and they never change.
    is_hyper_param_search, trial_name, trial_params, total_flos = False, None, None, 0

    def count(self, rows: int, tokens: int, of: int) -> None:
        """Add the rows and tokens of a step. `of` is the number of rows in an epoch."""
        self.num_tokens += tokens
        rows += round(self.epoch * of)  # whole rows, so that rounding errors do not add up
        self.epoch = rows / of

    def __deepcopy__(self, memo: dict) -> "TrainerState":
        """Copy the state for a reward function, without copying the dicts of the history."""
        return dataclasses.replace(self, log_history=list(self.log_history))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, for a checkpoint. Settings and log are saved elsewhere."""
        return {name: getattr(self, name) for name in _PROGRESS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, except `max_steps`, which comes from the settings of the resumed run."""
        for name in _PROGRESS:
            if name != "max_steps":
                setattr(self, name, state[name])


_PROGRESS = (
    "global_step", "max_steps", "epoch", "num_tokens", "evaluated_at", "accuracy_before", "accuracy_after",
    "best_metric", "best_global_step", "stateful_callbacks",
)  # fmt: skip
