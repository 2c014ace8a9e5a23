"""Estimates from n draws of each problem, and their 95% intervals.

pass@k is the probability that at least one of k draws is right (Chen et al., arXiv 2107.03374): of all k-subsets of the
n draws, the share that holds a right one. maj@k is the probability that the vote of k draws is right: of all k-subsets,
the share whose most frequent answer is right; answers that tie share the win evenly, and a draw without an answer has
no vote. Both are exact means over the subsets, so unbiased for any k <= n.

Intervals take problems as drawn from a population: Wilson's for a share that is 0 or 1 of every problem, as of one
completion each (where all are alike, resamples would be too); the percentile bootstrap over problems (2,000 resamples
from a fixed seed) for every other mean.
"""

import math
from collections import Counter

import numpy as np

Z = 1.959963984540054  # two-sided 95% of the normal distribution
RESAMPLES = 2000
MAX_DRAWS = 1000  # beyond, numbers of subsets leave the range of a float


def pass_at_k(n, right, k):
    """The share of k-subsets of n draws that hold one of the `right` right ones."""
    _check(n, k)
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def maj_at_k(answers, right, k):
    """The share of k-subsets of the draws whose most frequent answer is right.

    Args:
        answers: n hashables, None for no answer. right: n booleans. Where the draws of one answer differ in being
            right, the answer counts by their share.
    """
    n = len(answers)
    _check(n, k)
    votes = Counter(answers)
    silent = votes.pop(None, 0)
    total = 0.0
    for answer, count in votes.items():
        worth = sum(ok for a, ok in zip(answers, right, strict=True) if a == answer) / count
        if worth == 0:
            continue
        others = Counter(size for other, size in votes.items() if other != answer)
        for top in range(1, min(count, k) + 1):
            total += worth * math.comb(count, top) * _ways(others, silent, top, k - top)
    return total / math.comb(n, k)


def _ways(others, silent, top, rest):
    """Ways to choose `rest` draws of the other answers, none of them more than `top` times; those in which t answers
    tie at `top` count 1 / (t + 1)."""
    ways = np.zeros((rest + 1, rest // top + 1))  # by draws chosen, by answers that tie
    ways[: min(silent, rest) + 1, 0] = [math.comb(silent, i) for i in range(min(silent, rest) + 1)]
    for size, answers in others.items():
        for _ in range(answers):
            new = np.zeros_like(ways)
            for chosen in range(min(size, top, rest) + 1):
                tie = int(chosen == top)
                moved = ways[: rest + 1 - chosen, : ways.shape[1] - tie]
                new[chosen:, tie:] += moved * math.comb(size, chosen)
            ways = new
    return float((ways[rest] / (np.arange(ways.shape[1]) + 1)).sum())


def _check(n, k):
    if not 1 <= k <= n:
        raise ValueError(f"k must be from 1 to the number of draws, {n}, got {k}")
    if n > MAX_DRAWS:
        raise ValueError(f"at most {MAX_DRAWS} draws of a problem can be counted, got {n}")


def wilson(successes, n):
    """Wilson's 95% interval of a share, (low, high)."""
    share, z2 = successes / n, Z * Z
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def bootstrap(values):
    """Percentile bootstrap of the mean over problems, (low, high). values: one a problem; NaN ones are left out."""
    values = np.asarray(values, dtype=np.float64)
    values = values[~np.isnan(values)]
    counts = np.random.default_rng(0).multinomial(len(values), np.full(len(values), 1 / len(values)), RESAMPLES)
    low, high = np.quantile(counts @ values / len(values), (0.025, 0.975))
    return float(low), float(high)
