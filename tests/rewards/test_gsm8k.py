"""The rewards of GSM8K, on made texts and on the data set's own solutions."""

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import DATA

from fastgrpo.rewards.gsm8k import LENGTH_PENALTY, correctness, digits_reward, format_reward, length_reward

SAMPLE = DATA / "gsm8k-64.jsonl"
GSM8K = os.environ.get("FASTGRPO_GSM8K")


def _solutions(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["answer"] for line in lines]


def _neighbours_score(solutions: list[str]) -> int:
    """Check every solution against its own answer and against the next one's; return how many of these differ."""
    assert set(correctness(solutions, solutions, answer=solutions)) == {1.0}
    neighbours = solutions[1:] + solutions[:1]
    scores = correctness(solutions, solutions, answer=neighbours)
    # Read apart from the code under test: the answers of GSM8K are whole numbers after the only marker.
    values, others = (
        [int(text.split("####")[1].replace(",", "")) for text in column] for column in (solutions, neighbours)
    )
    assert scores == [float(value == other) for value, other in zip(values, others, strict=True)]
    return scores.count(0.0)


def test_the_sample_scores_its_own_answers():
    solutions = _solutions(SAMPLE)
    assert len(solutions) == 64
    assert _neighbours_score(solutions) > 55


@pytest.mark.skipif(not GSM8K, reason="FASTGRPO_GSM8K does not name the folder of GSM8K's jsonl files")
def test_every_solution_scores_its_own_answer():
    solutions = [text for name in ("train.jsonl", "test.jsonl") for text in _solutions(Path(GSM8K) / name)]
    assert len(solutions) == 8792
    assert _neighbours_score(solutions) > 8000


def _spellings(value: int) -> list[tuple[str, float]]:
    """Right and wrong answers where the value is expected, with their rewards."""
    digits = str(abs(value))
    swapped = int(digits[1] + digits[0] + digits[2:]) if len(digits) > 1 else value
    return [
        (f"#### {value:,}", 1.0),
        (f"The answer is {value}.", 1.0),
        (f"<answer>{value}.0</answer>", 1.0),
        (f"<answer>${value:,}.00</answer>", 1.0),
        (f"<answer>{value}%</answer>", 1.0),
        (rf"\boxed{{{value:,} \text{{ dollars}}}}", 1.0),
        (rf"\boxed{{\frac{{{2 * value}}}{{2}}}}", 1.0),
        (f"{4 * value}/4", 1.0),
        (rf"\boxed{{{value - 1} + 1}}", 1.0),
        (rf"\boxed{{2 \times {abs(value)}{'+-'[value > 0]}{abs(value)}}}", float(value >= 0)),
        (rf"\boxed{{\sqrt{{{value**2}}}}}", float(value >= 0)),
        (f"<answer>{value + 1}</answer>", 0.0),
        (f"<answer>{-value}</answer>", float(value == 0)),
        (f"<answer>{swapped}</answer>", float(swapped == value)),
        (f"<answer>{value}0</answer>", float(value == 0)),
        (f"<answer>{value}.5</answer>", 0.0),
        (rf"\boxed{{{value} + 1}}", 0.0),
        (rf"\boxed{{{value}\sqrt{{2}}}}", float(value == 0)),
    ]


def test_thousands_of_spellings_have_the_right_rewards():
    folder = [Path(GSM8K) / name for name in ("train.jsonl", "test.jsonl")] if GSM8K else [SAMPLE]
    values = {int(text.split("####")[1].replace(",", "")) for path in folder for text in _solutions(path)}
    cases = [(value, *spelling) for value in values for spelling in _spellings(value)]
    assert len(cases) > (10_000 if GSM8K else 700)
    rewards = correctness([], [text for _, text, _ in cases], answer=[f"#### {value}" for value, _, _ in cases])
    differ = [(case, reward) for case, reward in zip(cases, rewards, strict=True) if case[2] != reward]
    assert not differ


@pytest.mark.parametrize("completion", ["<answer>42</answer>", r"\boxed{42}", "#### 42", "It is $42.00."])
def test_a_correct_value_is_rewarded_in_every_form(completion):
    messages = [{"role": "assistant", "content": completion}]
    assert correctness(["?", "?"], [completion, messages], answer=["#### 42", "#### 42"]) == [1.0, 1.0]


def test_a_wrong_or_unreadable_value_is_not_rewarded():
    completions = [
        "<answer>41</answer>",
        "",
        "#### 42, no: <answer>?</answer>",
        [{"role": "assistant", "content": "4"}],
    ]
    assert correctness(["?"] * 4, completions, answer=["#### 42"] * 4) == [0.0] * 4


def test_a_row_without_a_reference_number_is_not_scored():
    assert correctness(["?"] * 4, ["42"] * 4, answer=[None, "", "unknown", "#### 42"]) == [None, None, None, 1.0]


def test_a_reference_may_be_a_bare_number():
    assert correctness(["?"] * 4, ["42"] * 4, answer=[42, 42.0, "42", 41]) == [1.0, 1.0, 1.0, 0.0]


def test_every_completion_needs_a_reference():
    with pytest.raises(ValueError):
        correctness(["?"] * 2, ["42"] * 2, answer=["#### 42"])


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>6 x 7</think><answer>42</answer>", 0.5),
        ("<think>\n6 x 7\n</think>\n<answer>\n42\n</answer>", 0.5),
        (r"<think>6 x 7</think><answer>\boxed{42}</answer>", 0.5),
        ("<think>6 x 7</think><answer>none</answer>", 0.4),
        ("<think>6 x 7</think><answer></answer>", 0.4),
        ("<think>6 x 7</think><answer>42", 0.4),
        ("<think>6 x 7<answer>42</answer>", 0.4),
        ("<think>6 x 7</think> 42", 0.2),
        ("<answer>42</answer>", 0.3),
        ("<think>6 x 7", 0.1),
        # a closing tag with no opening tag before it, and the opening tag after it
        ("6 x 7</think><answer>42</answer>", 0.3),
        ("</think>6 x 7<think><answer>42</answer>", 0.3),
        # a tag that is repeated
        ("<think><think>6 x 7</think><answer>42</answer>", 0.4),
        ("<think>6 x 7</think></think><answer>42</answer>", 0.4),
        ("<think>6 x 7</think><answer>41</answer><answer>42</answer>", 0.3),
        ("<think></think>" * 9, 0.0),
        ("42", 0.0),
        ("#### 42", 0.0),
        ("", 0.0),
    ],
)
def test_format_reward(completion, reward):
    messages = [{"role": "assistant", "content": completion}]
    assert format_reward(["?", "?"], [completion, messages]) == pytest.approx([reward, reward])


def test_length_reward_falls_from_the_soft_limit_to_the_limit():
    lengths = [0, 1, 80, 85, 90, 100, 150]
    rewards = length_reward(
        ["?"] * 7,
        ["..."] * 7,
        completion_ids=[[0] * length for length in lengths],
        trainer_state=SimpleNamespace(max_completion_length=100),
    )
    assert rewards == pytest.approx([LENGTH_PENALTY * share for share in (0, 0, 0, -0.25, -0.5, -1, -1)])


def totals(texts, answers, lengths, limit):
    """The sum of the default rewards of each completion."""
    passed = dict(
        completion_ids=[[0] * length for length in lengths],
        trainer_state=SimpleNamespace(max_completion_length=limit),
        answer=answers,
    )
    columns = [reward([""] * len(texts), texts, **passed) for reward in (correctness, format_reward, length_reward)]
    return [sum(column) for column in zip(*columns, strict=True)]


def test_the_rewards_add_up_as_the_page_says():
    """docs/training.md has these rows."""
    texts = ["<think>6 x 7 = 42</think><answer>42</answer>", "42", *["<think>?</think><answer>7</answer>"] * 2]
    texts, lengths = [*texts, "<think>?", "?", ""], [9, 9, 9, 100, 100, 100, 0]
    assert totals(texts, ["#### 42"] * 7, lengths, 100) == pytest.approx([1.5, 1, 0.5, 0.4, 0, -0.1, -0.1])


def test_silence_never_pays():
    """At any length up to the limit, no text scores less than an empty one, and a well-formed wrong one scores more."""
    rng = random.Random(0)
    pieces = [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "42",
        "41",
        " ",
        "\n",
        "so",
        "#### 7",
        "\\boxed{",
        "}",
        "é",
    ]
    for _ in range(300):
        limit = rng.randint(1, 80)
        said = "".join(rng.choices(pieces[4:], k=rng.randint(1, 6)))
        well_formed = f"<think>{said}</think><answer>{rng.randint(-99, 41)}</answer>"
        texts = ["", " \n", well_formed, "".join(rng.choices(pieces, k=rng.randint(1, 9)))]
        lengths = [rng.randint(0, limit), rng.randint(1, limit), limit, rng.randint(1, limit)]
        empty, blank, wrong, other = totals(texts, ["#### 42"] * 4, lengths, limit)
        assert empty == blank == -LENGTH_PENALTY < other + 1e-9, texts
        assert empty < wrong < 1, (texts, limit)


@pytest.mark.parametrize("state", [None, SimpleNamespace(), SimpleNamespace(max_completion_length=0)])
def test_length_reward_needs_a_limit(state):
    with pytest.raises(ValueError, match="max_completion_length"):
        length_reward(["?"], ["..."], completion_ids=[[0]], trainer_state=state)


def test_every_reward_takes_what_the_trainer_passes():
    passed = dict(
        completion_ids=[[1, 2]],
        trainer_state=SimpleNamespace(max_completion_length=10),
        log_metric=print,
        log_extra=print,
        answer=["#### 42"],
        question=["6 x 7?"],
    )
    completions = ["<think>6 x 7</think><answer>42</answer>"]
    rewards = [reward(["6 x 7?"], completions, **passed) for reward in (correctness, format_reward, length_reward)]
    assert rewards == [[1.0], [pytest.approx(0.5)], [0.0]]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>?</think><answer>12</answer>", 1.0),
        ("<answer> 13\n</answer>", 0.5),
        ("<answer>2</answer>", 0.5),
        ("<answer>21</answer>", 0.0),
        ("<answer>112</answer>", 2 / 3),
        ("<answer>012</answer>", 1.0),
        ("<answer>12.", 1.0),
        ("<answer>12.5</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("12", 0.0),
        ("<answer>12</answer><answer>x</answer>", 0.0),
        ("<answer>9</answer><answer>12</answer>", 1.0),
        ([{"role": "assistant", "content": "<answer>12</answer>"}], 1.0),
    ],
)
def test_digits_count_in_their_places(completion, reward):
    assert digits_reward([""], [completion], ["5 + 7 = 12\n#### 12"]) == [reward]


def test_references_that_are_no_whole_numbers_give_no_digits():
    assert digits_reward([""] * 3, ["<answer>1</answer>"] * 3, ["#### 0.5", None, "#### one"]) == [0.0] * 3
    with pytest.raises(ValueError, match="argument 2 is"):
        digits_reward([""], ["<answer>1</answer>"], [])
