"""Estimates of pass@k and maj@k from n completions of each problem, and 95% confidence intervals of means.

pass@k is the probability that at least one of k completions is right (Chen et al., arXiv 2107.03374). Its estimate is
the share of all k-subsets of the n completions that contain a right one:

    pass@k = 1 - C(n - right, k) / C(n, k)

maj@k is the probability that a majority vote among k completions is right. Its estimate is the share of all k-subsets
whose most frequent answer is right. Ties share the win evenly, and a completion without an answer has no vote. Both
estimates are exact means over the subsets, so they are unbiased for every k <= n.

Intervals treat the problems as a sample from a population. Wilson's interval is for means of zeros and ones, because
the bootstrap has no width if all problems agree. Other means use the percentile bootstrap, with 2,000 resamples from a
fixed seed.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

Z = 1.959963984540054  # quantile of the normal distribution for a two-sided 95% interval
RESAMPLES = 2000
DIGITS = 12  # decimals of maj@k, so that a vote that is always right is exactly 1, which selects the interval


def pass_at_k(n: int, right: int, k: int) -> float:
    """Estimate pass@k of one problem: the share of k-subsets of its completions with a right one.

    Args:
        n: Number of completions, at most 1000: with more, the number of subsets exceeds the range of a float.
        right: Number of right completions.
        k: The size of the subsets, from 1 to n.

    Returns:
        The estimate, from 0 to 1.
    """
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def maj_at_k(answers: Sequence[Hashable], right: Sequence[bool], k: int) -> float:
    """Estimate maj@k of one problem: the share of k-subsets of its completions whose most frequent answer is right.

    Args:
        answers: The answer of each of the n completions (at most 1000), None for a completion without one.
        right: Whether each completion is right. An answer with right and wrong completions counts by its share of right
            ones.
        k: The size of the subsets, from 1 to n.

    Returns:
        The estimate, from 0 to 1.
    """
    n = len(answers)
    votes = Counter(answers)
    silent = votes.pop(None, 0)
    worth = Counter()  # number of right answers of each size, each weighted by its right share
    for answer, ok in zip(answers, right, strict=True):
        if ok and answer is not None:
            worth[votes[answer]] += 1 / votes[answer]
    total, sizes = 0.0, Counter(votes.values())
    for count, share in worth.items():
        others = sizes - Counter([count])
        for top in range(1, min(count, k) + 1):
            total += share * math.comb(count, top) * _ways(others, silent, top, k - top)
    return round(total / math.comb(n, k), DIGITS)


def _ways(others, silent, top, rest):
    """Count the ways to choose `rest` completions among those with other answers, no answer more than `top` times.

    A way in which t other answers also occur `top` times, and so tie with the winner, counts 1 / (t + 1).
    """
    ways = np.zeros((rest + 1, 1))  # indices: completions chosen, answers that tie
    ways[: min(silent, rest) + 1, 0] = [math.comb(silent, i) for i in range(min(silent, rest) + 1)]
    for size, answers in sorted(others.items()):  # sizes that cannot tie come first, with one column
        for _ in range(answers):
            columns = min(ways.shape[1] + (size >= top), rest // top + 1)
            new = np.zeros((rest + 1, columns))
            for chosen in range(min(size, top, rest) + 1):
                tie = int(chosen == top)
                moved = ways[: rest + 1 - chosen, : columns - tie]
                new[chosen:, tie : tie + moved.shape[1]] += moved * math.comb(size, chosen)
            ways = new
    return float((ways[rest] / (np.arange(ways.shape[1]) + 1)).sum())


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Compute Wilson's 95% score interval of a share (E. B. Wilson, JASA 22, 1927).

    Args:
        successes: How many of the observations are 1.
        n: The number of observations.

    Returns:
        The lower and the upper end of the interval, within 0 to 1.
    """
    share, z2 = successes / n, Z * Z
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def bootstrap(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Compute the 95% percentile bootstrap interval of a mean over problems.

    Args:
        values: One value per problem. Problems with NaN are dropped.

    Returns:
        The lower and the upper end of the interval.
    """
    values = np.asarray(values, dtype=np.float64)
    values = values[~np.isnan(values)]
    counts = np.random.default_rng(0).multinomial(len(values), np.full(len(values), 1 / len(values)), RESAMPLES)
    low, high = np.quantile(counts @ values / len(values), (0.025, 0.975))
    return float(low), float(high)
