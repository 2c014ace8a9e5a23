"""What a function may log, and what is refused when it is logged."""

import dataclasses
import math

import pytest
import tiny
import torch
from samples import answer

from fastgrpo.data.records import Prompt
from fastgrpo.data.token_text import TokenText
from fastgrpo.rewards.values import Logs
from fastgrpo.run.metrics import SAMPLE_COLUMNS
from fastgrpo.trainer.collect import sample_rows


def test_numbers_and_columns_are_kept():
    notes = Logs(2)
    for value in (1, 0.5, torch.tensor(2.0), True):
        notes.log_metric("a", value)
    notes.log_extra("b", [1, 2])
    notes.log_extra("b", torch.tensor([3, 4]))  # the later values
    notes.log_extra("c", (text for text in "xy"))
    assert notes.metrics == {"a": [1.0, 0.5, 2.0, 1.0]}
    assert notes.columns == {"b": [3, 4], "c": ["x", "y"]}


@pytest.mark.parametrize("value", [math.nan, -math.inf, 10**400, 1e300, torch.tensor(math.inf)])
def test_a_number_that_has_no_place_in_a_mean_is_noted_as_nan(value):
    notes = Logs(2)
    notes.log_metric("a", value)
    assert math.isnan(notes.metrics["a"][0])
    notes.log_extra("b", [{"deep": [math.nan]}, -math.inf])
    assert notes.columns == {"b": [{"deep": [None]}, None]}
    notes.log_extra("c", [{"deep": torch.tensor(2.5)}, 1])
    assert notes.columns["c"] == [{"deep": 2.5}, 1]


@pytest.mark.parametrize(
    "name, value, match",
    [
        ("a", "3", "takes a number, got '3'"),
        ("a", None, "takes a number, got None"),
        ("a", torch.ones(2), r"takes a number, got tensor\(\[1., 1.\]\)"),
        (None, 1, r"log_metric\(None, ...\): a name is a text"),
        ("", 1, "a name is a text that is not empty"),
        ("\ud800", 1, r"log_metric\('\\ud800', ...\): the name cannot be written as UTF-8"),
    ],
)
def test_metrics_that_are_refused(name, value, match):
    notes = Logs(2)
    with pytest.raises(ValueError, match=match):
        notes.log_metric(name, value)
    assert not notes.metrics


@pytest.mark.parametrize(
    "column, values, match",
    [
        (7, [1, 2], r"log_extra\(7, ...\): a name is a text"),
        ("a\udfff", [1, 2], "the name cannot be written as UTF-8"),
        ("a", [1], "takes one value a completion: 2, got 1"),
        ("a", iter(range(9)), "takes one value a completion: 2, got more than 2"),
        ("a", "xy", "takes a list, got 'xy'"),
        ("a", {"x": 1, "y": 2}, "takes a list, got {'x': 1, 'y': 2}"),
        ("a", ["x", "\ud800"], "takes what JSON can hold: 'utf-8' codec can't encode"),
        ("a", [1, {"b": 10**5000}], "takes what JSON can hold: Exceeds the limit"),
        ("a", [1, {2}], "takes what JSON can hold: Object of type set"),
    ],
)
def test_columns_that_are_refused(column, values, match):
    notes = Logs(2)
    with pytest.raises(ValueError, match=match):
        notes.log_extra(column, values)
    assert not notes.columns


def test_steps_are_kept_for_each_completion():
    notes = Logs(3)
    assert notes.steps is None
    notes.log_steps([[1, 3], None, torch.tensor([2])], [(0.5, True), [], torch.tensor([0.25])])
    assert notes.steps == [((1, 0.5), (3, 1.0)), (), ((2, 0.25),)]
    assert all(type(end) is int and type(reward) is float for of_one in notes.steps for end, reward in of_one)


@pytest.mark.parametrize(
    "ends, rewards, match",
    [
        ([[1]], [[1.0], []], r"takes a list of 2 lists of ends, one a completion; got 1"),
        ([[1], []], "ab", r"2 lists of rewards, one a completion; got 'ab'"),
        (
            [[1], []],
            [[1.0, 2.0], []],
            r"as many rewards as ends .* completion 0 has ends \[1\] and rewards \[1.0, 2.0\]",
        ),
        ([[1], 3], [[1.0], [2.0]], "completion 1 has ends 3 and"),
        ([[], [2, 2]], [[], [1.0, 1.0]], "ends that rise from 1 .*; completion 1 has 2 after 2"),
        ([[0], []], [[1.0], []], "completion 0 has 0 after 0"),
        ([[1.5], []], [[1.0], []], "completion 0 has 1.5 after 0"),
        ([[True], []], [[1.0], []], "completion 0 has True after 0"),
        ([[1], []], [[math.nan], []], "rewards that are a finite number .*; completion 0 has nan"),
        ([[1], []], [[None], []], "completion 0 has None"),
    ],
)
def test_steps_that_are_refused(ends, rewards, match):
    notes = Logs(2)
    with pytest.raises(ValueError, match=match):
        notes.log_steps(ends, rewards)
    assert notes.steps is None


@pytest.mark.parametrize("column", SAMPLE_COLUMNS)
def test_no_column_of_a_sample_can_be_overwritten(column):
    with pytest.raises(ValueError, match=rf"log_extra\('{column}', ...\): every sample has such a column; choose"):
        Logs(1).log_extra(column, [1])


def test_the_columns_of_a_sample_are_those_of_samples_jsonl():
    completion = answer(Prompt([1], "p"), [2], "c", rewards={"f": 1.0})
    completion = dataclasses.replace(completion, ratios=torch.ones(1), clipped=torch.zeros(1, dtype=torch.bool))
    (line,) = sample_rows(1, 0, [completion], TokenText(tiny.tokenizer()))
    assert tuple(line) == SAMPLE_COLUMNS
