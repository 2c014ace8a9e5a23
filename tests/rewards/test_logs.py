"""Validation of rewards, numbers, JSON values and logs of reward functions."""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy
import pandas
import pytest
import tiny
import torch
from samples import answer

from fastgrpo.data.records import Prompt
from fastgrpo.data.token_text import TokenText
from fastgrpo.rewards.guard import shown
from fastgrpo.rewards.values import Logs, json_values, number, read_verdicts
from fastgrpo.run.metrics import SAMPLE_COLUMNS
from fastgrpo.trainer.collect import sample_rows

LISTS = [
    [1.0, 2.0], (1.0, 2.0), map(float, "12"), {"a": 1.0, "b": 2.0}.values(), [True, Fraction(2)],
    torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([[1.0], [2.0]]),
    torch.tensor([1, 2], dtype=torch.bfloat16), numpy.array([1, 2], dtype=numpy.float16),
    pandas.Series([1.0, 2.0], index=[7, 3]),
]  # fmt: skip
NO_LISTS_OF_ONE = [
    {"a": 1.0}, {1.0}, frozenset({1.0}), {"a": 1.0}.keys(), "a", b"a", pandas.DataFrame({0: [1.0]}), 1.0, None,
    ValueError("a"), [], [1.0] * 9, itertools.repeat(1.0),
]  # fmt: skip
NUMBERS = [
    (True, 1.0), (3, 3.0), (Fraction(1, 2), 0.5), (numpy.float32(2), 2.0), (torch.tensor([4]), 4.0),
    (-3.4e38, -3.4e38), (math.nan, None), (-math.inf, None), (3.5e38, None), (10**400, None), (10**5000, None),
    ("3", None), (1j, None), (None, None), (torch.ones(2), None),
]  # fmt: skip


@pytest.mark.parametrize("values", LISTS, ids=lambda value: type(value).__name__)
def test_lists_are_read_in_their_order(values):
    assert read_verdicts(values, 2) == [1.0, 2.0]


@pytest.mark.parametrize("values", NO_LISTS_OF_ONE, ids=lambda value: type(value).__name__)
def test_rejects_results_that_are_not_lists_of_the_right_length(values):
    assert isinstance(read_verdicts(values, 1), str)


def test_each_reward_is_judged_by_itself():
    first, second, third = read_verdicts([None, math.inf, 1], 3)
    assert first is None and third == 1.0 and "inf for completion 1" in second


@pytest.mark.parametrize("value, read", NUMBERS, ids=lambda value: type(value).__name__)
def test_accepts_only_finite_numbers_in_range(value, read):
    assert number(value) == read
    assert type(number(value)) in (float, type(None))


def test_logged_values_are_converted_by_json():
    inner = [1, "é", None]
    values = json_values([torch.tensor(2), {3: inner}, (0.1, True), 10**300])
    inner.clear()
    assert values == [2, {"3": [1, "é", None]}, [0.1, True], 10**300]
    nested = []
    for _ in range(100_000):
        nested = [nested]
    for value in ([10**5000], "\ud800", {"\udfff": 1}, {1}, object(), nested):
        with pytest.raises((ValueError, TypeError, RecursionError)):
            json_values([value])


def test_formats_any_value_for_errors():
    class Odd:
        def __repr__(self):
            raise RuntimeError("no text")

    assert shown("a\nb") == repr("a\nb") and shown(torch.ones(2, 2)).startswith("tensor([[1., 1.], [1., 1.]])")
    assert len(shown("a" * 1000)) == 60
    assert shown(Odd()) == "a value of type Odd" and shown(10**5000) == "a value of type int"


def test_numbers_columns_and_steps_are_kept():
    notes = Logs(2)
    assert notes.steps is None
    for value in (1, 0.5, torch.tensor(2.0), True):
        notes.log_metric("a", value)
    notes.log_extra("b", [1, 2])
    notes.log_extra("b", torch.tensor([3, 4]))  # the later values
    notes.log_extra("c", (text for text in "xy"))
    notes.log_extra("d", [{"deep": [math.nan, torch.tensor(2.5)]}, -math.inf])
    assert notes.metrics == {"a": [1.0, 0.5, 2.0, 1.0]}
    assert notes.columns == {"b": [3, 4], "c": ["x", "y"], "d": [{"deep": [None, 2.5]}, None]}
    for value in (math.nan, -math.inf, 10**400, 1e300, torch.tensor(math.inf)):  # these have no place in a mean
        notes.log_metric("b", value)
    assert len(notes.metrics["b"]) == 5 and all(map(math.isnan, notes.metrics["b"]))
    notes = Logs(3)
    notes.log_steps([[1, 3], None, torch.tensor([2])], [(0.5, True), [], torch.tensor([0.25])])
    assert notes.steps == [((1, 0.5), (3, 1.0)), (), ((2, 0.25),)]
    assert all(type(end) is int and type(reward) is float for of_one in notes.steps for end, reward in of_one)


STEPS = [
    ([[1]], [[1.0], []]), ([[1], []], "ab"), ([[1], []], [[1.0, 2.0], []]), ([[1], 3], [[1.0], [2.0]]),
    ([[], [2, 2]], [[], [1.0, 1.0]]), ([[0], []], [[1.0], []]), ([[1.5], []], [[1.0], []]),
    ([[True], []], [[1.0], []]), ([[1], []], [[math.nan], []]), ([[1], []], [[None], []]),
]  # fmt: skip
VALUES = [[1], iter(range(9)), "xy", {"x": 1, "y": 2}, ["x", "\ud800"], [1, {"b": 10**5000}], [1, {2}]]


@pytest.mark.parametrize("function, first, second", [
    *[("log_metric", "a", value) for value in ("3", None, torch.ones(2))],
    *[("log_metric", name, 1) for name in (None, "", "\ud800", "reward")],
    *[("log_extra", name, [1, 2]) for name in (7, "a\udfff", *SAMPLE_COLUMNS)],
    *[("log_extra", "a", values) for values in VALUES], *[("log_steps", *pair) for pair in STEPS],
])  # fmt: skip
def test_rejects_wrong_logs(function, first, second):
    notes = Logs(2)
    with pytest.raises(ValueError, match=function):
        getattr(notes, function)(first, second)
    assert not notes.metrics and not notes.columns and notes.steps is None


def test_the_columns_of_a_sample_are_those_of_samples_jsonl():
    completion = answer(Prompt([1], "p"), [2], "c", rewards={"f": 1.0})
    completion = dataclasses.replace(completion, ratios=torch.ones(1), clipped=torch.zeros(1, dtype=torch.bool))
    (line,) = sample_rows(1, 0, [completion], TokenText(tiny.tokenizer()))
    assert tuple(line) == SAMPLE_COLUMNS[:-2]
