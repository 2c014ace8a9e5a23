"""The rewards of GSM8K and the punishment of long completions; answers.csv has examples of formats and digits."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import strategies as st
from paths import DATA

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.rewards import gsm8k
from fastgrpo.rewards.gsm8k import LENGTH_PENALTY, correctness, digits_reward, format_reward, length_reward
from fastgrpo.rewards.overlong import make_soft_overlong_punishment, shaping

GSM8K = os.environ.get("FASTGRPO_GSM8K")
NO_GSM8K = pytest.mark.skipif(not GSM8K, reason="FASTGRPO_GSM8K does not name the folder of GSM8K's jsonl files")
FILES = [Path(GSM8K or "") / name for name in ("train.jsonl", "test.jsonl")]
WHOLE = pytest.param(FILES, 8792, marks=[pytest.mark.slow, NO_GSM8K])


def chat(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("paths, count", [([DATA / "gsm8k-64.jsonl"], 64), WHOLE], ids=["sample", "whole"])
def test_every_solution_scores_its_own_answer_and_no_other_one(paths, count):
    solutions = [json.loads(line)["answer"] for path in paths for line in path.read_text().splitlines()]
    assert len(solutions) == count and set(correctness(solutions, solutions, answer=solutions)) == {1.0}
    # Read apart from the code under test: the answers of GSM8K are whole numbers after the only marker.
    values = [int(text.split("####")[1].replace(",", "")) for text in solutions]
    scores = correctness(solutions, solutions, answer=solutions[1:] + solutions[:1])
    assert scores == [float(a == b) for a, b in zip(values, values[1:] + values[:1], strict=True)]
    assert scores.count(0.0) > 0.85 * count
    assert sum(gsm8k.steps_reward(solutions, solutions)) >= 0.9 * count  # the others use words or variables


def test_each_calculation_that_can_be_read_must_be_right():
    texts = {
        "He pays $1,200 x 2 = $2,400.": 1, "He pays 1,200 × 2 = 2,300.": 0, "7 big blocks + 3 = <<7+3=10>>10 blocks": 1,
        "6+3*2 = 6+6 = 12": 1, "6+3*2 = 9+6 = 12": 0, "10/3 = 3.33": 1, "10/3 = 3.36": 0, "10/3 = 4": 0,
        "(8 - 2) ÷ 4 = 1.5, 1 = 2": 1, "48/2 = 24 and 24 + 48 = 71": 0, "2 – 1/2 = 3/2": 1, "1/0 = 1, 2 + 2 = 4": 1,
        "20% of 5 = 2, x + 3 = 5": 0, "The answer is 72": 0, "": 0,
        "10 - 15 = -5": 1, "1 + 1 = 2, 10 - 15 = -7": 0,
    }  # fmt: skip
    assert gsm8k.steps_reward([], [chat(text) for text in texts]) == list(texts.values())


def test_correctness():
    completions = ["<answer>42</answer>", chat("It is $42.00."), "<answer>41</answer>", "", "#### 42, no: <answer>?"]
    assert correctness([], completions, answer=["#### 42"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
    # A reference may be a bare number. Without one, a completion is not judged.
    references = [42, 42.0, "42", 41, None, "", "unknown"]
    assert correctness([], ["42"] * 7, answer=references) == [1.0, 1.0, 1.0, 0.0, None, None, None]
    with pytest.raises(ValueError):
        correctness([], ["42"] * 2, answer=["#### 42"])
    tagged = chat("<think>6 x 7</think><answer>42</answer>")
    assert digits_reward([], [tagged] * 4, ["#### 43", "#### 0.5", None, "#### one"]) == [0.5, 0.0, 0.0, 0.0]


def totals(texts, lengths, limit):
    """The sum of the default rewards of each completion, where 42 is right, called as the trainer calls them."""
    passed = dict(
        completion_ids=[[0] * length for length in lengths], answer=["#### 42"] * len(texts), question=[""],
        trainer_state=SimpleNamespace(max_completion_length=limit), log_metric=print, log_extra=print,
    )  # fmt: skip
    columns = [reward([""] * len(texts), texts, **passed) for reward in (correctness, format_reward, length_reward)]
    return [sum(column) for column in zip(*columns, strict=True)]


PIECES = ["<think>", "</think>", "<answer>", "</answer>", "42", "41", " ", "\n", "so", "#### 7", "\\boxed{", "}", "é"]


@hypothesis.given(st.lists(st.sampled_from(PIECES), min_size=1), st.integers(-99, 41), st.integers(1, 80), st.data())
def test_empty_completions_get_the_lowest_reward(pieces, number, limit, data):
    """At any length up to the limit, no text scores less than an empty one, and a well-formed wrong one scores more."""
    said = "".join(piece for piece in pieces if "<" not in piece)
    wrong = f"<think>{said}</think><answer>{number}</answer>"
    lengths = [data.draw(st.integers(0, limit)), data.draw(st.integers(1, limit)), limit, limit]
    empty, blank, wrong, other = totals(["", " \n", wrong, "".join(pieces)], lengths, limit)
    assert empty == blank == -LENGTH_PENALTY < other + 1e-9 and empty < wrong < 1


def test_length_reward_falls_from_the_soft_limit_to_the_limit():
    ids, state = [[0] * length for length in (0, 1, 80, 85, 90, 100, 150)], SimpleNamespace(max_completion_length=100)
    rewards = length_reward([], ["..."] * 7, completion_ids=ids, trainer_state=state)
    assert rewards == pytest.approx([LENGTH_PENALTY * share for share in (0, 0, 0, -0.25, -0.5, -1, -1)])
    for state in (None, SimpleNamespace(max_completion_length=0)):
        with pytest.raises(ValueError, match="max_completion_length"):
            length_reward([], ["..."], completion_ids=[[0]], trainer_state=state)


# DAPO's equation 13 at L_max = 10, of which `cache` tokens are L_cache
@pytest.mark.parametrize("cache, rewards", [
    (1, [0, 0, 0, 0, 0, 0, -1, -1]),
    (4, [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]),
    (10, [0, -0.1, -0.6, -0.7, -0.8, -0.9, -1, -1]),
])  # fmt: skip
def test_the_soft_overlong_punishment(cache, rewards):
    ids = [[7] * length for length in (0, 1, 6, 7, 8, 9, 10, 11)]
    (function,) = shaping(GRPOConfig(max_completion_length=10, soft_punish_cache=cache))
    for punishment in (function, make_soft_overlong_punishment(10, cache)):
        assert punishment(prompts=[], completions=[], completion_ids=ids) == pytest.approx(rewards)
        assert punishment.__name__ == "soft_overlong_punishment" and not punishment.pooled
    assert shaping(GRPOConfig()) == []
