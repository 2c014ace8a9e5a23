"""Each fault of a reward function is found, by functions that have exactly one."""

import itertools
import math
import re
import threading

import pool_rewards
import pytest
import torch

from fastgrpo.data.records import Completion, Prompt, Rollout
from fastgrpo.evaluation.reward_check import check_reward, rank_correlation

NUMBERS = [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]]


def group(numbers, prompt):
    row = Prompt([], prompt, {"answer": 5})
    return [Completion(row, Rollout([65], torch.zeros(1), "stop"), f"it is {number}") for number in numbers]


GROUPS = [group(numbers, f"prompt {i}") for i, numbers in enumerate(NUMBERS)]


def check(function):
    """Judge with a clock that never gets on."""
    return check_reward(function, GROUPS, clock=lambda: 0.0)


def value(text):
    return float(text.split()[-1])


def good(completions, **columns):
    return [value(text) for text in completions]


async def good_async(completions, **columns):
    return [value(text) for text in completions]


def constant(completions, **columns):
    return [0.5] * len(completions)


def by_prompt(prompts, **columns):
    return [float(prompt[-1]) for prompt in prompts]


def gives_nan(completions, **columns):
    return [math.nan if value(text) == 9 else value(text) for text in completions]


def by_order(completions, **columns):
    return [value(text) + i for i, text in enumerate(completions)]


def by_others(completions, **columns):
    return [value(text) / max(map(value, completions)) for text in completions]


def by_group(completions, prompts, **columns):
    best = {}
    for prompt, text in zip(prompts, completions, strict=True):
        best[prompt] = max(best.get(prompt, 0), value(text))
    return [value(text) / best[prompt] for prompt, text in zip(prompts, completions, strict=True)]


by_group.group_wise = True
CALLS = itertools.count()


def random(completions, **columns):
    call = next(CALLS)
    return [value(text) + call for text in completions]


def mutates(completions, **columns):
    rewards = [value(text) for text in completions]
    completions.reverse()
    return rewards


async def mutates_async(completions, answer, **columns):
    answer[0] = 7
    return [value(text) for text in completions]


def misses(completions, solution, **columns):
    return [value(text) for text in completions]


def raises(completions, **columns):
    raise RuntimeError("no such thing")


def none(completions, **columns):
    return [None] * len(completions)


def short(completions, **columns):
    return [1.0]


@pytest.mark.parametrize("function", [good, good_async, by_group])
def test_a_good_reward_has_no_warning(function):
    found = check(function)
    assert found.warnings == [] and found.errors == found.none == found.timeouts == 0 and found.spread == 1


def test_the_figures():
    found = check(good)
    flat = torch.tensor(NUMBERS, dtype=torch.float64).flatten()
    assert found.mean == pytest.approx(flat.mean().item())
    assert found.deviation == pytest.approx(flat.std(correction=0).item())
    assert (found.best[0].content, found.best[1]) == ("it is 9", 9) and found.worst[1] == 1


@pytest.mark.parametrize(
    "function, words",
    [
        (constant, "constant"),
        (by_prompt, "never differs within a group"),
        (gives_nan, "returns NaN"),
        (by_order, "depends on the order"),
        (by_others, "set group_wise = True"),
        (random, "is random"),
        (mutates, r"changes its arguments \(completions\)"),
        (mutates_async, r"changes its arguments \(answer\)"),
        (lambda completions, **columns: good(completions), "cannot be pickled"),
    ],
)
def test_each_fault_is_told_alone(function, words):
    (warning,) = check(function).warnings
    assert re.search(words, warning), warning


@pytest.mark.parametrize(
    "function, words",
    [
        (misses, "needs the column 'solution'"),
        (raises, "RuntimeError: no such thing"),
        (none, "gives no completion a reward"),
        (short, "must return a list"),
    ],
)
def test_faults_that_leave_no_reward(function, words):
    found = check(function)
    assert any(words in warning for warning in found.warnings) and math.isnan(found.mean)
    assert found.errors == (0 if function is none else 12) and found.none == (12 if function is none else 0)


def test_longer_is_better():
    row = Prompt([], "p", {})
    groups = [[Completion(row, Rollout([65], torch.zeros(1), "stop"), "x" * n) for n in range(1, 10)]]
    (warning,) = check_reward(by_length, groups, clock=lambda: 0.0).warnings
    assert "Longer is better: its rank correlation with the length is 1.00" in warning


def by_length(completions, **columns):
    return [float(len(text)) for text in completions]


def test_a_slow_reward_is_told_of_the_pool():
    seconds = iter([0.0, 1.2])
    found = check_reward(good, GROUPS, clock=lambda: next(seconds))
    assert found.milliseconds == pytest.approx(100) and "--reward_workers" in found.warnings[0]


def test_what_brings_its_own_processes_need_not_be_pickled():
    class Own:
        pooled = False

        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, completions, **columns):
            return good(completions)

    assert check(Own()).warnings == []


def test_what_takes_too_long_is_counted_and_told(tmp_path):
    texts = ["fine", f"hang {tmp_path / 'child'}"]
    row = Prompt([], "prompt", {})
    groups = [[Completion(row, Rollout([65], torch.zeros(1), "stop"), text) for text in texts]]
    found = check_reward(pool_rewards.endless, groups, timeout=1.0, workers=2)
    assert (found.timeouts, found.errors, found.none) == (1, 0, 0)
    assert "It takes more than 1 s for 1 completions" in found.warnings[-1]


def test_a_limit_that_nothing_reaches_changes_no_finding():
    def found(**limit: float) -> list[str]:
        return check_reward(pool_rewards.changes, GROUPS, clock=lambda: 0.0, **limit).warnings

    assert found(timeout=600.0) == found()
    assert "It changes its arguments (completions)" in found()[0]


def test_rank_correlation_gives_ties_their_mean_rank():
    one, two = torch.tensor([1.0, 2, 2, 3]), torch.tensor([10.0, 20, 30, 40])
    assert rank_correlation(one, two) == pytest.approx(0.9486833)
    assert rank_correlation(one, torch.ones(4)) == 0
