"""Micro-batches: assigns samples to micro-batches and ranks.

Micro-batches are bins of a token budget, filled by best fit decreasing: the largest group first, each where the least
room is left. Each rank computes the micro-batches of all ranks from the lengths of all samples, so the number of passes
needs no communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fastgrpo.data.records import Sample, prompt_groups
from fastgrpo.ranks import ALONE, Ranks


def by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put sequences of similar lengths into batches, whose padded tokens are at most `budget`."""
    batches, longest = [], 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
            longest = lengths[i]
    return batches


def micro_batches(
    samples: Sequence[Sample], max_tokens: int, share_prompt: bool = True, padded: bool = False
) -> list[list[int]]:
    """Split samples into micro-batches of at most `max_tokens` inputs, and return the sample indices of each.

    For models that run padded sequences, `padded` counts the padding, and the prompt of each sample.

    Samples that share a prompt count it once and stay in one micro-batch. Such a group is split if it exceeds
    `max_tokens`. It is also split if it fits into no micro-batch, and there is already one more than all tokens need.
    If all samples fit, they are one micro-batch in their order.
    """
    if padded:
        return sorted(map(sorted, by_length([len(sample) - 1 for sample in samples], max_tokens)))
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
        self.left, self.held = [], []  # of each micro-batch: tokens left, and indices of its samples

    def fitting(self, tokens):
        """Return the micro-batch with the least room that fits this many tokens, or None."""
        return min((i for i, left in enumerate(self.left) if left >= tokens), key=self.left.__getitem__, default=None)

    def another(self):
        self.left.append(self.size)
        self.held.append([])
        return len(self.left) - 1

    def put(self, place, indices, tokens):
        self.held[place] += indices
        self.left[place] -= tokens

    def spread(self, first, prompt, own):
        """Put the samples of a group one by one into the micro-batch with the most room."""
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
    """Distributes samples over ranks.

    With `lockstep`, all ranks run equally many passes (see `Policy.lockstep`). `padded`: see `micro_batches`.
    """

    max_tokens: int
    share_prompt: bool = True
    ranks: Ranks = ALONE
    lockstep: bool = False
    padded: bool = False

    def shares(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Distribute samples over the ranks, balanced by tokens. Return the sample indices of each rank.

        The samples of a prompt stay together, unless they exceed the share of a rank. The largest groups come first,
        each goes to the rank with the fewest tokens so far.
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
        """In lockstep, wait on the host for all ranks."""
        if self.lockstep:
            self.ranks.meet(what)

    def passes(self, samples: Sequence[Sample], shares: Sequence[Sequence[int]]) -> list[list[int]]:
        """Split the share of this rank into micro-batches. In lockstep, empty ones fill it up to the common number."""
        mine = shares[self.ranks.rank]
        parts = [[mine[i] for i in part] for part in self._split(samples, mine)]
        return parts + [[]] * ((self.agreed(samples, shares) or 0) - len(parts))

    def agreed(self, samples: Sequence[Sample], shares: Sequence[Sequence[int]]) -> int | None:
        """Return the number of passes of each rank in lockstep, or None."""
        return max(len(self._split(samples, share)) for share in shares) if self.lockstep else None

    def _split(self, samples, share):
        return micro_batches([samples[i] for i in share], self.max_tokens, self.share_prompt, self.padded)
