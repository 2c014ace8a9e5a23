"""Countdown's verifier: exact values, each number at most once, and no text that costs or raises."""

import ast
import random
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

from fastgrpo.rewards import countdown
from fastgrpo.rewards.countdown import MAX_DEPTH, MAX_LENGTH, answer_value, correctness, format_reward

NUMBERS = [2, 3, 3, 7, 7]


def value(expression, numbers=NUMBERS):
    return answer_value(f"<answer>{expression}</answer>", numbers)


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("7", 7),
        ("2+3*7", 23),
        ("(2+3)*7", 35),
        (" ( 7 - 2 ) / 3 ", Fraction(5, 3)),
        ("7/3/2", Fraction(7, 6)),
        ("7-3-2", 2),
        ("2-7", -5),
        ("7*7-2*3", 43),
        ("(((7)))", 7),
        ("7/(3-7/3)", Fraction(21, 2)),  # in floats, 10.500000000000002
    ],
)
def test_expressions_have_their_exact_value(expression, expected):
    assert value(expression) == expected


ATTACKS = {
    "nothing": "",
    "blanks": "   ",
    "an equation": "2+3=5",
    "a list": "2,3",
    "no operand": "2+",
    "no operator": "2 3",
    "brackets that do not match": "(2+3",
    "empty brackets": "()",
    "a tuple": "(2,3)",
    "a power": "2**3",
    "a tower of powers": "7**7**7**7",
    "floor division": "7//2",
    "remainder": "7%2",
    "bits": "2^3",
    "a minus before a number": "-2",
    "a plus before a number": "+2",
    "many signs": "2" + "-" * 60 + "3",
    "a name": "x",
    "a call": "exit()",
    "a number called": "2(3)",
    "an import": "__import__('os')",
    "an attribute": "(2).real",
    "a comparison": "2<3",
    "a conditional": "2 if 3 else 7",
    "an assignment": "(x:=2)",
    "a lambda": "lambda: 2",
    "text": "'2'*7",
    "true": "True+2",
    "a decimal number": "2.0+3",
    "an exponent": "2e3",
    "a complex number": "2j",
    "a hexadecimal number": "0x2",
    "a leading zero": "02+3",
    "an underscore": "7_7",
    "digits of another script": "٢+٣",
    "wide digits": "２+３",
    "a superscript": "2²",
    "a fraction sign": "½",
    "a minus of typography": "7−2",
    "a null character": "2+\x003",
    "a line break": "2+\n3",
    "a comment": "2+3#",
    "a number that is not given": "2+4",
    "a number used twice": "2+2",
    "a number used three times": "7+7+7",
    "a huge number": "9" * MAX_LENGTH,
    "division by zero": "2/(7-7)",
    "zero over zero": "(7-7)/(7-7)",
    "too long": "2+3" + " " * MAX_LENGTH + "+7",
    "ten thousand characters": "2+" * 5000 + "3",
    "ten thousand digits": "9" * 10_000,
    "ten thousand brackets": "(" * 10_000 + "2" + ")" * 10_000,
    "brackets up to the limit": "(" * 45 + "2" + ")" * 44,
    "a deep tree": "1" + "+1" * (MAX_LENGTH // 2 - 1),
    "a deep tree to the right": "2-(" * 24 + "2" + ")" * 24,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_have_no_value_and_raise_nothing(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python's parser may warn about what it reads
        assert value(ATTACKS[name]) is None


def test_limits_are_where_they_are_said_to_be():
    deep = "+".join(["1"] * (MAX_DEPTH + 1))
    assert value(deep, [1] * 20) == MAX_DEPTH + 1 and value(deep + "+1", [1] * 20) is None
    filled = "2+3" + " " * (MAX_LENGTH - 5) + "+7"
    assert len(filled) == MAX_LENGTH and value(filled) == 12 and value(filled + "-7") is None
    nested = "(" * ((MAX_LENGTH - 1) // 2) + "2" + ")" * ((MAX_LENGTH - 1) // 2)
    assert value(nested) == 2


def test_texts_from_a_long_way_off_neither_raise_nor_find_a_value():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choice("0123456789+-*/() ._,=x\n\\'\"[]{}<>&|~^%@!:;é") for _ in range(rng.randint(0, 30)))
        found = value(text, [])  # no number is given, so no expression has a value
        assert found is None, text


def test_the_last_answer_counts():
    text = "<answer>2+3</answer> no, <answer>7*3</answer> is it"
    assert answer_value(text, NUMBERS) == 21
    assert answer_value("<answer>2+3</answer> no, <answer>7*3", NUMBERS) == 5  # the other one has no end
    for none in ("2+3", "<answer>2+3", "2+3</answer>", "</answer>2+3<answer>", "<ANSWER>2+3</ANSWER>", ""):
        assert answer_value(none, NUMBERS) is None, none


@pytest.mark.parametrize("text", ["<answer>" * 100_000, "</answer>" * 100_000, "<answer></answer>" * 100_000])
def test_a_million_tags_are_read_once(text):
    """No search starts again at every tag, which would take hours: the text is gone over once for each kind of tag."""
    assert answer_value(text, NUMBERS) is None


def test_nothing_is_run(monkeypatch):
    """The tree is computed from nodes that are known."""
    for name in ("eval", "exec"):
        monkeypatch.setattr(f"builtins.{name}", lambda *_: pytest.fail("text of a model was run"))
    assert value("2+3*7") == 23 and value("__import__('os').system('false')") is None
    assert set(countdown._OPERATIONS) == {ast.Add, ast.Sub, ast.Mult, ast.Div}


def test_rewards():
    texts = ["3+7=10 <answer>(3+7)*2</answer>", "<answer>3+7</answer>", "<answer>3+3</answer>", "20", ""]
    columns = {"nums": [[2, 3, 7]] * 5, "target": [20] * 5}
    assert correctness(texts, texts, **columns, trainer_state=None) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert format_reward(texts, texts, **columns) == [0.1, 0.1, 0.0, 0.0, 0.0]
    assert format_reward.full_mark == 0.1
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert correctness(texts, messages, **columns) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_not_every_number_need_be_used():
    assert correctness([""], ["<answer>7*2</answer>"], nums=[[2, 3, 7]], target=[14]) == [1.0]


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"target": [None]}, "column target must hold whole numbers in each row, got None"),
        ({"target": ["24"]}, "column target must hold whole numbers in each row, got '24'"),
        ({"target": [2.5]}, "column target must hold whole numbers in each row, got 2.5"),
        ({"target": [float("nan")]}, "column target must hold whole numbers in each row, got nan"),
        ({"target": [True]}, "column target must hold whole numbers in each row, got True"),
        ({"nums": [5]}, "column nums must hold a list of whole numbers in each row, got 5"),
        ({"nums": ["2 3"]}, "column nums must hold a list of whole numbers in each row, got '2 3'"),
        ({"nums": [None]}, "column nums must hold a list of whole numbers in each row, got None"),
        ({"nums": [["2", "3"]]}, "column nums must hold whole numbers in each row, got '2'"),
        ({"nums": [[[1], 2]]}, r"column nums must hold whole numbers in each row, got \[1\]"),
        ({"nums": [[2, True]]}, "column nums must hold whole numbers in each row, got True"),
    ],
)
def test_a_row_without_whole_numbers_is_refused(columns, message):
    """Otherwise such a row would silently have no reward for ever, or a reward for an answer without a value."""
    row = {"nums": [[2, 3]], "target": [6], **columns}
    with pytest.raises(ValueError, match=message):
        correctness([""], ["<answer>2*</answer>"], **row)
    if "nums" in columns:
        with pytest.raises(ValueError, match=message):
            format_reward([""], [""], **row)


def test_whole_numbers_of_other_libraries_count():
    for kind in (np.array, torch.tensor, tuple):
        for target in (6, 6.0, np.int64(6), torch.tensor(6)):
            assert correctness([""], ["<answer>2*3</answer>"], nums=[kind([2, 3])], target=[target]) == [1.0]


def test_numbers_and_completions_must_be_as_many():
    with pytest.raises(ValueError):
        correctness([""], ["<answer>2</answer>"] * 2, nums=[[2]], target=[2])
