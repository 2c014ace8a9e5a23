"""pass@k and maj@k against enumeration of all subsets; intervals against closed forms and by coverage."""

from collections import Counter
from itertools import combinations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from fastgrpo.evaluation.estimators import bootstrap, maj_at_k, pass_at_k, wilson


def vote(answers, right):
    """The probability that the vote of these draws is right: ties share evenly, None has no vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(right[answer] for answer in winners) / len(winners) if winners else 0.0


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=9), st.booleans())
def test_pass_at_k_and_maj_at_k_are_means_over_all_subsets(answers, both):
    n, worth = len(answers), {"a": True, "b": both, "c": False, "d": False, None: False}
    right = [worth[answer] for answer in answers]
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        passed = sum(any(right[i] for i in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(n, sum(right), k) == pytest.approx(passed, abs=1e-12)
        voted = sum(vote([answers[i] for i in subset], worth) for subset in subsets) / len(subsets)
        assert maj_at_k(answers, right, k) == pytest.approx(voted, abs=1e-12), (answers, k)


def test_a_vote_that_is_always_right_is_exactly_1():
    n = 64
    for wrong in range(n // 4):
        answers = ["a"] * (n - wrong) + [wrong % 3] * wrong
        assert maj_at_k(answers, [answer == "a" for answer in answers], n // 2 + 1) == 1.0
    assert maj_at_k(range(1, n + 1), [True] * n, n) == 1.0


def test_handles_many_draws():
    answers = [i % 40 for i in range(200)]
    right = [answer == 0 for answer in answers]
    assert maj_at_k(answers, right, 200) == pytest.approx(1 / 40) == maj_at_k(answers, right, 1)
    assert pass_at_k(200, 5, 196) == 1.0
    assert maj_at_k(["a", "a", "b"], [True, False, False], 3) == 0.5  # right at times, which counts by its share
    assert pass_at_k(1000, 1, 500) == 0.5


def test_wilson_interval_equals_published_values():
    # Newcombe 1998, table I: 81 of 263 and 0 of 20 at 95%.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    low, high = wilson(20, 20)
    assert high == 1.0 and low == pytest.approx(0.8389, abs=5e-5)


def test_bootstrap_has_coverage_and_is_deterministic():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        values = rng.beta(2, 5, size=30)
        low, high = bootstrap(values)
        assert low < values.mean() < high
        hits += low <= 2 / 7 <= high
    assert 0.90 <= hits / 100 <= 0.98
    assert bootstrap(values) == bootstrap(values) == bootstrap([*values, float("nan")])
    assert bootstrap([1.0, 1.0]) == (1.0, 1.0)
