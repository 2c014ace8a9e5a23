"""The records that cross stages, and the packing of sequences into one row of tokens.

Shapes: S sequences of a micro-batch, N packed tokens (prompts and completions), M completion tokens. Packed tensors
are 1-D over tokens; padding does not exist here.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Batch:
    """A packed micro-batch on the device, in the order of rows that `PackedAttention` reads.

    input_ids, position_ids: [N]. lengths: tokens of each sequence. branches: of each prompt that several samples share,
    the lengths of their branches; both on the host. rows: [M], where among the N the hidden state stands that predicts
    each completion token; the first tokens of samples that share a prompt hang on one state. targets, weights,
    old_logps, ref_logps, sampler_logps, rollout_logps: [M]. advantages: [S]. cu_seqlens: [S+1] over the M, on the
    host.
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
    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor | None
    sampler_logps: torch.Tensor | None
    rollout_logps: torch.Tensor | None

    @classmethod
    def pack(cls, samples, device, share_prompt=True):
        """Samples side by side; with `share_prompt`, one prompt for neighbours that have the same. A tensor that the
        first sample lacks is None for the batch."""
        layout = _Layout(prompt_groups(samples, share_prompt))
        counts = [len(sample.completion_ids) for sample in samples]

        def to_device(values, dtype=torch.int64):
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        def joined(name):
            values = [getattr(sample, name) for sample in samples]
            return None if values[0] is None else torch.cat(values).to(device, non_blocking=True)

        return cls(
            input_ids=to_device(layout.ids),
            position_ids=to_device(layout.positions),
            lengths=layout.lengths,
            branches=layout.branches,
            rows=to_device(layout.rows),
            targets=to_device([token for sample in samples for token in sample.completion_ids]),
            cu_seqlens=torch.tensor([0, *accumulate(counts)]),
            advantages=to_device([sample.advantage for sample in samples], torch.float32),
            weights=joined("weights"),
            old_logps=joined("old_logps"),
            ref_logps=joined("ref_logps"),
            sampler_logps=joined("sampler_logps"),
            rollout_logps=joined("rollout_logps"),
        )


class _Layout:
    """Groups of samples with one prompt -> the token rows of a batch.

    The state at position p predicts the token at p + 1: the first completion token hangs on the last of the prompt, and
    the last completion token predicts nothing, so it is no input.
    """

    def __init__(self, groups):
        self.ids, self.positions, self.lengths = [], [], []
        shared = [i for i, group in enumerate(groups) if sum(len(s.completion_ids) > 1 for s in group) > 1]
        self.branches = [[len(s.completion_ids) - 1 for s in groups[i] if len(s.completion_ids) > 1] for i in shared]
        rows = {}
        ends = {i: self._put(groups[i][0].prompt_ids, 0)[-1] for i in shared}
        for i in shared:
            prompt = len(groups[i][0].prompt_ids)
            rows[i] = [[ends[i], *self._put(sample.completion_ids[:-1], prompt)] for sample in groups[i]]
        for i in set(range(len(groups))) - set(shared):  # one sequence: no more than one sample has inputs of its own
            longest = max((sample.completion_ids for sample in groups[i]), key=len)
            prompt = groups[i][0].prompt_ids
            inputs = self._put(prompt + longest[:-1], 0)[len(prompt) - 1 :]
            rows[i] = [inputs[: len(sample.completion_ids)] for sample in groups[i]]
        self.rows = [row for i in range(len(groups)) for of_sample in rows[i] for row in of_sample]

    def _put(self, tokens, position):
        """Append a sequence that starts at this position; returns its rows."""
        rows = range(len(self.ids), len(self.ids) + len(tokens))
        self.ids += tokens
        self.positions += range(position, position + len(tokens))
        if tokens:
            self.lengths.append(len(tokens))
        return rows


def prompt_groups(samples, share_prompt=True):
    """Runs of neighbours with the same prompt; each sample alone where prompts are not shared."""
    groups = []
    for sample in samples:
        if share_prompt and groups and groups[-1][0].prompt_ids == sample.prompt_ids:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def split_by_tokens(samples, max_tokens, share_prompt=True):
    """Consecutive runs of samples with at most `max_tokens` inputs each; a longer sample stands alone.

    Samples that share a prompt count it once and stay together, unless they are more than `max_tokens` by themselves:
    then every run that some of them are in has the prompt.
    """
    parts, tokens = [], max_tokens
    for group in prompt_groups(samples, share_prompt):
        prompt, own = len(group[0].prompt_ids), [len(sample.completion_ids) - 1 for sample in group]
        if tokens + prompt + sum(own) > max_tokens:
            parts.append([])
            tokens = 0
        tokens += prompt
        for sample, more in zip(group, own, strict=True):
            if parts[-1] and tokens + more > max_tokens:
                parts.append([])
                tokens = prompt
            parts[-1].append(sample)
            tokens += more
    return parts
