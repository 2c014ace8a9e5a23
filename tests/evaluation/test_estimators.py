"""pass@k and maj@k against enumeration of all subsets; intervals against closed forms and by coverage."""

import random
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from fastgrpo.evaluation.estimators import bootstrap, maj_at_k, pass_at_k, wilson


def vote(answers, right):
    """The probability that the vote of these draws is right: ties share evenly, None has no vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(right[answer] for answer in winners) / len(winners) if winners else 0.0


@pytest.mark.parametrize("seed", range(12))
def test_both_are_means_over_all_subsets(seed):
    rng = random.Random(seed)
    n = rng.randrange(1, 10)
    answers = [rng.choice(["a", "b", "c", "d", None]) for _ in range(n)]
    worth = {"a": True, "b": seed % 2 == 0, "c": False, "d": False}
    right = [worth.get(answer, False) for answer in answers]
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        passed = sum(any(right[i] for i in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(n, sum(right), k) == pytest.approx(passed, abs=1e-12)
        voted = sum(vote([answers[i] for i in subset], worth) for subset in subsets) / len(subsets)
        assert maj_at_k(answers, right, k) == pytest.approx(voted, abs=1e-12), (answers, k)


def test_one_draw_is_the_mean_and_all_draws_are_the_vote():
    answers, right = ["a"] * 3 + ["b"] * 2 + [None], [True] * 3 + [False] * 3
    assert pass_at_k(6, 3, 1) == maj_at_k(answers, right, 1) == 0.5
    assert maj_at_k(answers, right, 6) == 1.0
    assert maj_at_k(["a", "b"], [True, False], 2) == 0.5
    assert maj_at_k([None, None], [False, False], 2) == 0.0


def test_an_answer_that_is_right_at_times_counts_by_its_share():
    assert maj_at_k(["a", "a", "b"], [True, False, False], 3) == 0.5


@pytest.mark.parametrize("n", [8, 64, 300])
def test_a_vote_that_is_always_right_is_exactly_1(n):
    """Then Wilson's interval serves; the bootstrap would have no width."""
    for wrong in range(n // 4):
        answers = ["a"] * (n - wrong) + [wrong % 3] * wrong
        assert maj_at_k(answers, [answer == "a" for answer in answers], n // 2 + 1) == 1.0
    assert maj_at_k(range(1, n + 1), [True] * n, n) == 1.0


def test_many_draws():
    answers = [i % 40 for i in range(200)]
    right = [answer == 0 for answer in answers]
    assert maj_at_k(answers, right, 200) == pytest.approx(1 / 40)
    assert maj_at_k(answers, right, 1) == pytest.approx(1 / 40)
    assert pass_at_k(200, 5, 196) == 1.0


@pytest.mark.parametrize("call", [lambda: pass_at_k(4, 1, 5), lambda: maj_at_k(["a"], [True], 0)])
def test_k_is_from_1_to_the_draws(call):
    with pytest.raises(ValueError, match="k must be from 1 to the number of completions"):
        call()


def test_more_draws_than_can_be_counted():
    with pytest.raises(ValueError, match="at most 1000 completions of a problem, got 1001"):
        pass_at_k(1001, 1, 500)


def test_wilson():
    # Newcombe 1998, table I: 81 of 263 and 0 of 20 at 95%.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    low, high = wilson(20, 20)
    assert high == 1.0 and low == pytest.approx(0.8389, abs=5e-5)


def test_the_bootstrap_covers_and_is_the_same_every_time():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        values = rng.beta(2, 5, size=30)
        low, high = bootstrap(values)
        assert low < values.mean() < high
        hits += low <= 2 / 7 <= high
    assert 0.90 <= hits / 100 <= 0.98
    assert bootstrap(values) == bootstrap(values)


def test_the_bootstrap_leaves_out_what_was_not_given():
    values = [0.0, 1.0, 0.5, 0.25]
    assert bootstrap([*values, float("nan")]) == bootstrap(values)
    assert bootstrap([1.0, 1.0]) == (1.0, 1.0)
