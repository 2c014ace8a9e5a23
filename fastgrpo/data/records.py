"""The records that cross stages."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Prompt:
    """A prompt as it enters the rollout.

    ids: its tokens. prompt: what reward functions see, a string or a list of messages. columns: the row's other
    columns, which reward functions get by name.
    """

    ids: list[int]
    prompt: str | list[dict]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """One completion: token ids (the stop token included), fp32 log-probs of the draws, and why it ended.

    `logps` [len(ids)] are under the full softmax at the sampling temperature. `finish_reason` is "stop" or "length".
    `kept` [len(ids)]: the probability that top-k, top-p or min-p left at each draw; None without them.
    """

    ids: list[int]
    logps: torch.Tensor
    finish_reason: str
    kept: torch.Tensor | None = None

    @property
    def truncated(self):
        return self.finish_reason == "length"


@dataclass
class Sample:
    """One completion on its way through an update. Per-token tensors are [len(completion_ids)] fp32.

    `weights` are the objective's w_n over the whole update; `old_logps` stay None on the first update of a rollout.
    masked: its tokens do not count. clipped: the share of its tokens whose ratio the last update clipped.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    advantage: float
    sampler_logps: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    masked: bool = False
    clipped: float = 0.0

    def __len__(self):
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass
class TrainerState:
    """What reward functions may know of the run: steps done, of how many, epochs done, and the completion limit."""

    global_step: int
    max_steps: int
    epoch: float
    max_completion_length: int
