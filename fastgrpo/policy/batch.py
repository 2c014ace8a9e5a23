"""Batches: which samples go through the policy together, on which rank, and how they are packed.

Packing puts the samples of a micro-batch into one sequence of tokens without padding. Micro-batches are filled to their
token budget as bins with items, the largest group first, each where it leaves the least room (best fit decreasing).
Each rank computes the micro-batches of all ranks from the lengths of all samples. So the number of passes needs no
communication.

Shapes: S samples of a micro-batch, N packed tokens (of prompts and completions), M completion tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from fastgrpo.data.records import Sample
from fastgrpo.loss.inputs import to_device
from fastgrpo.ranks import ALONE, Ranks


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


def micro_batches(samples: Sequence[Sample], max_tokens: int, share_prompt: bool = True) -> list[list[int]]:
    """Split samples into micro-batches of at most `max_tokens` inputs each; returns the indices of each one's samples.

    Samples that share a prompt count it once and stay in one micro-batch. They are spread over several only if they
    exceed `max_tokens` by themselves, or if they fit nowhere whole and there is already one micro-batch more than their
    tokens need at least. If all fit, they are one micro-batch in their order.
    """
    groups, start = [], 0
    for group in prompt_groups(samples, share_prompt):
        groups.append((start, len(group[0].prompt_ids), [len(sample.ids) - 1 for sample in group]))
        start += len(group)
    sizes = [prompt + sum(own) for _, prompt, own in groups]
    bins = _Bins(max_tokens, most=-(-sum(sizes) // max_tokens) + 1)
    for i in sorted(range(len(groups)), key=lambda i: (-sizes[i], i)):
        first, prompt, own = groups[i]
        place = bins.fitting(sizes[i])
        if place is None and len(bins.left) < bins.most and sizes[i] <= max_tokens:
            place = bins.another()
        if place is None:
            bins.spread(first, prompt, own)
        else:
            bins.put(place, range(first, first + len(own)), sizes[i])
    return sorted(map(sorted, bins.held))


class _Bins:
    """Micro-batches that are being filled."""

    def __init__(self, size, most):
        self.size, self.most = size, most
        self.left, self.held = [], []  # of each one the tokens that are left, and the indices of its samples

    def fitting(self, tokens):
        """Return the micro-batch with the least room that has room for so many tokens; None where there is none."""
        return min((i for i, left in enumerate(self.left) if left >= tokens), key=self.left.__getitem__, default=None)

    def another(self):
        self.left.append(self.size)
        self.held.append([])
        return len(self.left) - 1

    def put(self, place, indices, tokens):
        self.held[place] += indices
        self.left[place] -= tokens

    def spread(self, first, prompt, own):
        """Put the samples of a group one by one where the most room is left."""
        place = None
        for index, tokens in enumerate(own, first):
            if place is None or self.left[place] < tokens:
                place = max(range(len(self.left)), key=self.left.__getitem__, default=None)
                full = place is None or self.left[place] < prompt + tokens
                if full or len(self.left) < self.most:
                    place = self.another()
                self.put(place, (), prompt)
            self.put(place, (index,), tokens)


@dataclass(frozen=True)
class Dealer:
    """Deals samples to ranks. `lockstep` says whether all ranks make equally many passes, as `Policy.lockstep` does."""

    max_tokens: int
    share_prompt: bool = True
    ranks: Ranks = ALONE
    lockstep: bool = False

    def shares(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Deal samples to the ranks, so that each gets about as many tokens.

        The samples of a prompt stay together, unless they alone are more than the share of a rank. The largest groups
        are dealt first, each to the rank that has the fewest tokens so far.
        """
        size = self.ranks.size
        if size == 1:
            return [list(range(len(samples)))]
        pieces, start = [], 0
        total = sum(map(len, samples))
        for group in prompt_groups(samples, self.share_prompt):
            parts = min(len(group), -(-sum(map(len, group)) * size // max(total, 1)))
            bounds = [start + len(group) * i // parts for i in range(parts + 1)]
            pieces += [range(*pair) for pair in pairwise(bounds)]
            start += len(group)
        costs = [sum(len(samples[i]) for i in piece) for piece in pieces]
        shares, loads = [[] for _ in range(size)], [0] * size
        for i in sorted(range(len(pieces)), key=lambda i: (-costs[i], i)):
            rank = loads.index(min(loads))
            shares[rank] += pieces[i]
            loads[rank] += costs[i]
        return [sorted(share) for share in shares]

    def meet(self, what: str) -> None:
        """Wait on the host until all ranks are there, where their passes wait for each other."""
        if self.lockstep:
            self.ranks.meet(what)

    def passes(self, samples: Sequence[Sample], shares: Sequence[Sequence[int]]) -> list[list[int]]:
        """Split the share of this rank into micro-batches."""
        mine = shares[self.ranks.rank]
        parts = [[mine[i] for i in part] for part in self._split(samples, mine)]
        return parts + [[]] * ((self.agreed(samples, shares) or 0) - len(parts))

    def agreed(self, samples: Sequence[Sample], shares: Sequence[Sequence[int]]) -> int | None:
        """Count the passes that each rank makes in lockstep."""
        return max(len(self._split(samples, share)) for share in shares) if self.lockstep else None

    def _split(self, samples, share):
        return micro_batches([samples[i] for i in share], self.max_tokens, self.share_prompt)
