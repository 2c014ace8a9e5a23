"""Micro-batches: which samples go through the policy together, so that each pass is filled to its token budget.

The groups are packed into micro-batches as items into bins, the largest first, each where it leaves the least room
(best fit decreasing). Consecutive groups alone would fill a micro-batch to about two thirds.
"""

from collections.abc import Sequence

from fastgrpo.data.records import Sample
from fastgrpo.policy.batch import prompt_groups


def micro_batches(samples: Sequence[Sample], max_tokens: int, share_prompt: bool = True) -> list[list[int]]:
    """Split samples into micro-batches of at most `max_tokens` inputs each.

    Samples that share a prompt count it once and stay in one micro-batch. They are spread over several only if they
    exceed `max_tokens` by themselves, or if they fit nowhere whole and there is already one micro-batch more than their
    tokens need at least. Then each micro-batch that holds some of them holds the prompt.

    The result depends on the lengths and on the order of the samples alone. If all fit, they are one micro-batch in
    their order.
    """
    groups, start = [], 0
    for group in prompt_groups(samples, share_prompt):
        groups.append((start, len(group[0].prompt_ids), [len(sample.completion_ids) - 1 for sample in group]))
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
