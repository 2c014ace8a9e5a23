"""Which samples each rank computes, and in which passes.

All ranks know the lengths of all samples, and the result depends on nothing else. So every rank knows the micro-batches
of every other one, and they agree on the number of passes without asking each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fastgrpo.data.records import Sample
from fastgrpo.policy.batch import prompt_groups
from fastgrpo.policy.microbatches import micro_batches
from fastgrpo.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Dealer:
    """Deals samples to ranks.

    Attributes:
        max_tokens: The token budget of a micro-batch.
        share_prompt: Whether neighbours with the same prompt share its tokens.
        ranks: The ranks.
        lockstep: Whether all ranks make equally many passes, as `Policy.lockstep` says.
    """

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
