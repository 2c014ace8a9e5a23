"""Validation of rewards, numbers, JSON values and logs of reward functions."""

import math
from fractions import Fraction

import numpy
import pandas
import pytest
import torch

from fastgrpo.rewards.values import Logs, json_values, read_verdicts
from fastgrpo.run.metrics import SAMPLE_COLUMNS


@pytest.mark.parametrize("values", [
    [1.0, 2.0], (1.0, 2.0), map(float, "12"), {"a": 1.0, "b": 2.0}.values(), [True, Fraction(2)],
    torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([[1.0], [2.0]]),
    torch.tensor([1, 2], dtype=torch.bfloat16), numpy.array([1, 2], dtype=numpy.float16),
    pandas.Series([1.0, 2.0], index=[7, 3]),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_lists_are_read_in_their_order(values):
    assert read_verdicts(values, 2) == [1.0, 2.0]


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
    *[("log_metric", name, 1) for name in (None, "", "\ud800", "reward", "mean_length")],
    *[("log_extra", name, [1, 2]) for name in (7, "a\udfff", *SAMPLE_COLUMNS)],
    *[("log_extra", "a", values) for values in VALUES], *[("log_steps", *pair) for pair in STEPS],
])  # fmt: skip
def test_rejects_wrong_logs(function, first, second):
    notes = Logs(2)
    with pytest.raises(ValueError, match=function):
        getattr(notes, function)(first, second)
    assert not notes.metrics and not notes.columns and notes.steps is None
