"""What counts as a list of rewards, as a number, and as a value of JSON."""

import itertools
import math
from fractions import Fraction

import numpy
import pandas
import pytest
import torch

from fastgrpo.rewards.guard import listed, plain, shown
from fastgrpo.rewards.values import json_values, length, number, read_verdicts


class Odd:
    def __repr__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0],
        (1.0, 2.0),
        map(float, "12"),
        {"a": 1.0, "b": 2.0}.values(),
        torch.tensor([1.0, 2.0], requires_grad=True),
        torch.tensor([1, 2], dtype=torch.bfloat16),
        numpy.array([1, 2], dtype=numpy.float16),
        pandas.Series([1.0, 2.0], index=[7, 3]),
        [True, Fraction(2)],
    ],
)
def test_lists_are_read_in_their_order(values):
    assert read_verdicts(values, 2) == [1.0, 2.0]


@pytest.mark.parametrize(
    "values",
    [{"a": 1.0}, {1.0}, frozenset({1.0}), {"a": 1.0}.keys(), "a", b"a", pandas.DataFrame({0: [1.0]}), 1.0, None,
     ValueError("a")],
)  # fmt: skip
def test_what_is_no_list_is_not_taken_by_its_keys_or_letters(values):
    assert listed(values, 1) is None
    assert f"not a list but of type {type(values).__name__}" in read_verdicts(values, 1)


def test_the_length_is_told_and_an_endless_generator_ends():
    assert read_verdicts([1.0], 2) == "returned 1 rewards for 2 completions"
    assert read_verdicts([1.0] * 9, 2) == "returned 9 rewards for 2 completions"
    assert read_verdicts(itertools.repeat(1.0), 2) == "returned more than 2 rewards for 2 completions"
    assert length(iter([]), [], 2) == "0"


def test_each_reward_is_judged_by_itself():
    first, second, third = read_verdicts([None, math.inf, 1], 3)
    assert first is None and third == 1.0
    assert second == "returned inf for completion 1, not a finite number from -3.4e+38 to 3.4e+38 or None"


@pytest.mark.parametrize(
    "value, read",
    [(True, 1.0), (3, 3.0), (Fraction(1, 2), 0.5), (numpy.float32(2), 2.0), (torch.tensor([4]), 4.0),
     (-3.4e38, -3.4e38), (math.nan, None), (-math.inf, None), (3.5e38, None), (10**400, None), (10**5000, None),
     ("3", None), (1j, None), (None, None), (torch.ones(2), None)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_numbers(value, read):
    assert number(value) == read
    assert type(number(value)) in (float, type(None))


def test_several_numbers_stay_as_they_are():
    pair = torch.ones(2)
    assert plain(pair) is pair and plain(torch.ones(())) == 1.0


def test_values_come_back_as_json_has_them():
    inner = [1, "é", None]
    values = json_values([torch.tensor(2), {3: inner}, (0.1, True), 10**300])
    inner.clear()
    assert values == [2, {"3": [1, "é", None]}, [0.1, True], 10**300]


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [[10**5000], "\ud800", {"\udfff": 1}, {1}, object(), nested(100_000)],
)
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises((ValueError, TypeError, RecursionError)):
        json_values([value])


def test_any_value_can_be_shown():
    assert shown("a\nb") == repr("a\nb") and shown(torch.ones(2, 2)).startswith("tensor([[1., 1.], [1., 1.]])")
    assert len(shown("a" * 1000)) == 60
    assert shown(Odd()) == "a value of type Odd" and shown(10**5000) == "a value of type int"
