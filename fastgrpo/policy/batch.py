"""Packing: the samples of a micro-batch become one sequence of tokens without padding.

Shapes: S samples of a micro-batch, N packed tokens (of prompts and completions), M completion tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from fastgrpo.data.records import Sample
from fastgrpo.loss.staging import to_device


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
        layout = _Layout(prompt_groups(samples, share_prompt))
        counts = [len(sample.completion_ids) for sample in samples]

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
            targets=tensor([token for sample in samples for token in sample.completion_ids]),
            cu_seqlens=torch.tensor([0, *accumulate(counts)]),
            advantages=advantages,
            weights=joined("weights"),
            entropy_weights=joined("entropy_weights"),
            old_logps=joined("old_logps"),
            ref_logps=joined("ref_logps"),
            sampler_logps=joined("sampler_logps"),
            rollout_logps=joined("rollout_logps"),
        )


class _Layout:
    """The order of a batch's tokens, made from groups of samples that share a prompt.

    The hidden state at position p predicts the token at p + 1. The first completion token is therefore predicted by the
    state of the last prompt token, and the last completion token is no input, because it predicts nothing.
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
        for i in set(range(len(groups))) - set(shared):
            # The group is one sequence, because at most one of its samples has inputs of its own.
            longest = max((sample.completion_ids for sample in groups[i]), key=len)
            prompt = groups[i][0].prompt_ids
            inputs = self._put(prompt + longest[:-1], 0)[len(prompt) - 1 :]
            rows[i] = [inputs[: len(sample.completion_ids)] for sample in groups[i]]
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
