"""Each fault of a reward function is found, by functions that have exactly one."""

import itertools
import math
import re

import pytest
import torch
from pool_rewards import ends_on_9, hangs_on_9, value
from samples import answer, length

from fastgrpo.data.records import Prompt
from fastgrpo.evaluation.reward_check import check_reward, rank_correlation

NUMBERS = [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]]


def group(numbers, prompt):
    row = Prompt([], prompt, {"answer": 5})
    return [answer(row, [65], f"it is {number}") for number in numbers]


GROUPS = [group(numbers, f"prompt {i}") for i, numbers in enumerate(NUMBERS)]


def check(function, groups=GROUPS, **settings):
    """Judge with a stopped clock."""
    return check_reward(function, groups, **{"clock": lambda: 0.0, **settings})


def good(completions, **columns):
    return [value(text) for text in completions]


async def good_async(completions, **columns):
    return good(completions)


def constant(completions, **columns):
    return [0.5] * len(completions)


def by_prompt(prompts, **columns):
    return [float(prompt[-1]) for prompt in prompts]


def gives_nan(completions, **columns):
    return [math.nan if reward == 9 else reward for reward in good(completions)]


def by_order(completions, **columns):
    return [reward + i for i, reward in enumerate(good(completions))]


def by_others(completions, **columns):
    return [reward / max(good(completions)) for reward in good(completions)]


def by_group(completions, prompts, **columns):
    pairs = list(zip(prompts, good(completions), strict=True))
    return [reward / max(other for theirs, other in pairs if theirs == prompt) for prompt, reward in pairs]


by_group.group_wise = True
CALLS = itertools.count()


def random(completions, **columns):
    call = next(CALLS)
    return [reward + call for reward in good(completions)]


def mutates(completions, **columns):
    rewards = good(completions)
    completions.reverse()
    return rewards


async def mutates_async(completions, answer, **columns):
    answer[0] = 7
    return good(completions)


@pytest.mark.parametrize("function", [good, good_async, by_group])
def test_a_good_reward_has_no_warning(function):
    found = check(function)
    assert found.warnings == [] and found.errors == found.none == found.timeouts == 0 and found.spread == 1


def test_reports_mean_deviation_spread_and_time():
    found = check(good)
    flat = torch.tensor(NUMBERS, dtype=torch.float64).flatten()
    assert found.mean == pytest.approx(flat.mean().item())
    assert found.deviation == pytest.approx(flat.std(correction=0).item())
    assert (found.best[0].content, found.best[1]) == ("it is 9", 9) and found.worst[1] == 1
    seconds = itertools.chain([0.0, 0.0, 0.0, 1.2], itertools.repeat(0.0))  # of the first call of all completions
    found = check(good, clock=lambda: next(seconds))
    assert found.milliseconds == pytest.approx(100) and "--reward_workers" in found.warnings[0]


@pytest.mark.parametrize("function, words", [
    (constant, "constant"), (by_prompt, "never differs within a group"), (gives_nan, "returns NaN"),
    (by_order, "depends on the order"), (by_others, "set group_wise = True"), (random, "is random"),
    (mutates, r"changes its arguments \(completions\)"), (mutates_async, r"changes its arguments \(answer\)"),
    (lambda completions, **columns: good(completions), "cannot be pickled"),
])  # fmt: skip
def test_each_fault_gives_exactly_one_warning(function, words):
    (warning,) = check(function).warnings
    assert re.search(words, warning), warning


def test_completions_may_lack_what_a_check_needs():
    (warning,) = check(good, [one[:1] for one in GROUPS]).warnings
    assert "Each prompt has one completion" in warning
    row = Prompt([], "p", {})
    (warning,) = check(length, [[answer(row, [65], "x" * n) for n in range(1, 10)]]).warnings
    assert "It prefers long completions: its rank correlation with the length is 1.00" in warning


@pytest.mark.parametrize("function, words", [
    (lambda completions, solution, **_: good(completions), "needs the column 'solution'"),
    (lambda **_: [None] * 12, "gives no completion a reward"),
])  # fmt: skip
def test_faults_without_any_reward(function, words):
    found = check(function)
    assert any(words in warning for warning in found.warnings) and math.isnan(found.mean)
    assert (found.errors, found.none) == ((0, 12) if "gives" in words else (12, 0))


def test_slow_completions_are_counted_and_skipped():
    found = check(hangs_on_9, timeout=2)
    assert (found.timeouts, found.none, found.errors) == (1, 0, 0)
    assert found.best[1] == 8 and found.spread == 1
    (warning,) = found.warnings
    assert "longer than 2 s for 1 completions, the first 'it is 9'" in warning


def test_a_crashing_reward_is_an_error_and_the_check_continues():
    found = check(ends_on_9, timeout=600)
    assert (found.errors, found.timeouts, found.none) == (1, 0, 0)
    assert found.warnings == ["It ends its process on the completion 'it is 9'."]


def test_rank_correlation_gives_ties_their_mean_rank():
    one, two = torch.tensor([1.0, 2, 2, 3]), torch.tensor([10.0, 20, 30, 40])
    assert rank_correlation(one, two) == pytest.approx(0.9486833)
    assert rank_correlation(one, torch.ones(4)) == 0
