"""The records that cross stages, and the packing of sequences into one row of tokens.

Shapes: S sequences of a micro-batch, N packed tokens (prompts and completions), M completion tokens. Packed tensors
are 1-D over tokens; padding does not exist here.
"""

from dataclasses import dataclass, field
from itertools import accumulate
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
    """

    ids: list[int]
    logps: torch.Tensor
    finish_reason: str

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


@dataclass(frozen=True)
class Batch:
    """A packed micro-batch on the device.

    input_ids, position_ids: [N]. lengths: tokens of each sequence, on the host. rows: [M], where among the N the
    hidden state stands that predicts each completion token. targets, weights, old_logps, ref_logps, sampler_logps:
    [M]. advantages: [S]. cu_seqlens: [S+1] over the M completion tokens, on the host.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: list[int]
    rows: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor | None
    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor | None
    sampler_logps: torch.Tensor | None

    @classmethod
    def pack(cls, samples, device):
        """Samples side by side. A tensor that the first sample lacks is None for the batch."""
        ids, positions, rows, targets = [], [], [], []
        for sample in samples:
            # The state at position p predicts the token at p + 1: the first completion token hangs on the last of the
            # prompt, and the last completion token predicts nothing, so it need not be an input.
            start, prompt = len(ids), len(sample.prompt_ids)
            ids += sample.prompt_ids + sample.completion_ids[:-1]
            positions += range(len(ids) - start)
            rows += range(start + prompt - 1, len(ids))
            targets += sample.completion_ids
        counts = [len(sample.completion_ids) for sample in samples]

        def to_device(values, dtype=torch.int64):
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        def joined(name):
            values = [getattr(sample, name) for sample in samples]
            return None if values[0] is None else torch.cat(values).to(device, non_blocking=True)

        return cls(
            input_ids=to_device(ids),
            position_ids=to_device(positions),
            lengths=[len(sample) - 1 for sample in samples],
            rows=to_device(rows),
            targets=to_device(targets),
            cu_seqlens=torch.tensor([0, *accumulate(counts)]),
            advantages=to_device([sample.advantage for sample in samples], torch.float32),
            weights=joined("weights"),
            old_logps=joined("old_logps"),
            ref_logps=joined("ref_logps"),
            sampler_logps=joined("sampler_logps"),
        )


def split_by_tokens(samples, max_tokens):
    """Consecutive runs of samples with at most `max_tokens` tokens each; a longer sample stands alone."""
    parts, tokens = [], 0
    for sample in samples:
        if not parts or tokens + len(sample) > max_tokens:
            parts.append([])
            tokens = 0
        parts[-1].append(sample)
        tokens += len(sample)
    return parts
