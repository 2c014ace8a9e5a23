"""Countdown's verifier: exact values, each number at most once, bounded cost and no exceptions."""

import warnings
from collections import Counter
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from fastgrpo.rewards.countdown import MAX_DEPTH, MAX_LENGTH, answer_value, correctness, format_reward

NUMBERS = [2, 3, 3, 7, 7]
DEEP = "+".join(["1"] * (MAX_DEPTH + 1))


def value(expression, numbers=NUMBERS):
    return answer_value(f"<answer>{expression}</answer>", numbers)


@st.composite
def expressions(draw, numbers, depth=3):
    if depth == 0 or draw(st.booleans()):
        number = draw(st.sampled_from(numbers))
        return [number], str(number), Fraction(number)
    (one, left, a), (other, right, b) = (draw(expressions(numbers, depth - 1)) for _ in range(2))
    sign = draw(st.sampled_from("+-*/" if b else "+-*"))
    values = {"+": a + b, "-": a - b, "*": a * b, "/": b and a / b}
    return one + other, f"({left} {sign} {right})", values[sign]


def test_operators_have_the_usual_precedence():
    expressions = ["2+3*7", "7/3/2", "7-3-2", "7*7-2*3", "7/(3-7/3)"]
    assert [value(text) for text in expressions] == [23, Fraction(7, 6), 2, 43, Fraction(21, 2)]


@hypothesis.given(expressions([2, 3, 7]))
def test_computes_exact_values_with_each_number_used_at_most_once(case):
    used, text, expected = case
    assert value(text, used) == expected
    assert value(text) == (None if Counter(used) - Counter(NUMBERS) else expected)


@pytest.mark.parametrize("text", [
    "", "   ", "2+3=5", "2,3", "2+", "2 3", "(2+3", "()", "(2,3)", "2**3", "7**7**7**7", "7//2", "7%2", "2^3",
    "+2", "2" + "-" * 60 + "3", "x", "exit()", "2(3)", "__import__('os')", "(2).real", "2<3", "2 if 3 else 7", "(x:=2)",
    "lambda: 2", "'2'*7", "True+2", "2.0+3", "2e3", "2j", "0x2", "02+3", "7_7", "٢+٣", "２+３", "2²", "½", "7−2",
    "2+\x003", "2+\n3", "2+3#", "2+4", "2+2", "7+7+7", "9" * MAX_LENGTH, "2/(7-7)", "(7-7)/(7-7)",
    "2+3" + " " * MAX_LENGTH + "+7", "2+" * 5000 + "3", "9" * 10_000, "(" * 10_000 + "2" + ")" * 10_000,
    "(" * 45 + "2" + ")" * 44, "1" + "+1" * (MAX_LENGTH // 2 - 1), "2-(" * 24 + "2" + ")" * 24,
], ids=lambda text: repr(text[:20]))  # fmt: skip
def test_malicious_expressions_have_no_value(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python's parser may warn about what it reads
        assert value(text) is None


@hypothesis.given(st.text("0123456789+-*/() ._,=x\n\\'\"[]{}<>&|~^%@!:;é", max_size=30))
def test_no_text_raises(text):
    assert value(text, []) is None  # no number is given, so no expression has a value


def test_rejects_expressions_beyond_the_limits():
    assert value(DEEP, [1] * 20) == MAX_DEPTH + 1 and value(DEEP + "+1", [1] * 20) is None
    filled = "2+3" + " " * (MAX_LENGTH - 5) + "+7"
    assert len(filled) == MAX_LENGTH and value(filled) == 12 and value(filled + "-7") is None
    assert value("(" * ((MAX_LENGTH - 1) // 2) + "2" + ")" * ((MAX_LENGTH - 1) // 2)) == 2


def test_the_last_answer_counts():
    assert answer_value("<answer>2+3</answer> no, <answer>7*3</answer> is it", NUMBERS) == 21
    assert answer_value("<answer>2+3</answer> no, <answer>7*3", NUMBERS) == 5  # the other one has no end
    for none in ("2+3", "<answer>2+3", "2+3</answer>", "</answer>2+3<answer>", "<ANSWER>2+3</ANSWER>", ""):
        assert answer_value(none, NUMBERS) is None, none


def test_rewards():
    texts = ["3+7=10 <answer>(3+7)*2</answer>", "<answer>3+7</answer>", "<answer>3+3</answer>", "20", ""]
    columns = {"nums": [[2, 3, 7]] * 5, "target": [20] * 5}
    assert correctness(texts, texts, **columns, trainer_state=None) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert format_reward(texts, texts, **columns) == [0.1, 0.1, 0.0, 0.0, 0.0]
    assert format_reward.full_mark == 0.1
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert correctness(texts, messages, **columns) == [1.0, 0.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError):
        correctness(texts, texts[:2], nums=[[2]], target=[2])
    for kind in (np.array, torch.tensor, tuple):
        for target in (6, 6.0, np.int64(6), torch.tensor(6)):
            assert correctness([""], ["<answer>2*3</answer>"], nums=[kind([2, 3])], target=[target]) == [1.0]


def test_a_row_without_whole_numbers_is_refused():
    for column, values in (("target", (None, "24", 2.5, True)), ("nums", (5, "2 3", None, ["2", "3"], [2, True]))):
        for value in values:
            with pytest.raises(ValueError, match=f"column {column} must"):
                correctness([""], ["<answer>2*</answer>"], **{"nums": [[2, 3]], "target": [6], column: [value]})
    with pytest.raises(ValueError, match="column nums must"):
        format_reward([""], ["<answer>2*</answer>"], nums=[5], target=[6])
