"""Countdown: its puzzles, what the warm start shows of them, and whole runs of it."""

import functools
import json
import re
from fractions import Fraction

import pytest
import tiny

from fastgrpo import train
from fastgrpo.config.recipe import parse
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.sources import Curriculum
from fastgrpo.policy.load import prepare
from fastgrpo.rewards.countdown import answer_value
from fastgrpo.tasks import countdown
from fastgrpo.tasks.countdown import Puzzle, made, needed, puzzles_by_level, to_row, written


@functools.cache
def reachable(numbers):
    """Every value that all numbers reach, through any fractions: an independent and slower search."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    found = set()
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i != j:
                rest = [c for k, c in enumerate(numbers) if k not in (i, j)]
                for value in (a + b, a - b, a * b, *([Fraction(a) / b] if b else [])):
                    found |= reachable((value, *rest))
    return found


def test_what_two_numbers_make():
    assert made(3, 6) == made(6, 3) == {9: "6+3", 3: "6-3", 18: "6*3", 2: "6/3"}
    assert made(4, 4) == {8: "4+4", 16: "4*4", 1: "4/4"}  # 0 is too small
    assert made(10, 7) == {17: "10+7", 3: "10-7"}  # 70 is too large, and 10/7 is no whole number


def test_what_makes_a_target_with_a_number():
    assert needed(20, 2) == {18: "{}+2", 22: "{}-2", 10: "{}*2", 40: "{}/2"}
    assert needed(2, 8) == {6: "8-{}", 10: "{}-8", 16: "{}/8", 4: "8/{}"}
    for target in range(1, countdown.LARGEST_VALUE + 1):
        for number in range(1, countdown.LARGEST + 1):
            for value, expression in needed(target, number).items():
                answer = f"<answer>{expression.format(value)}</answer>"
                assert answer_value(answer, [value, number]) == target


def test_written_puzzles():
    assert written(Puzzle((3, 7), 21)) == "10 4 21;<answer>7*3</answer>"
    assert written(Puzzle((2, 3, 7), 20)) == (
        "7:13 27,5 1 6;3:17 23,9 5 14;2:18 22 10 40,10 4 21;<answer>(7+3)*2</answer>"
    )
    assert written(Puzzle((4, 4, 6), 7)) == "6:1 13 42,8 16 1;<answer>(4/4)+6</answer>"
    assert written(Puzzle((5, 5, 8), 49)) is None and written(Puzzle((3, 7), 5)) is None


def test_puzzles_need_all_of_their_numbers():
    limit = parse(["--task", "countdown"]).max_completion_length
    two, three, held_out = puzzles_by_level()
    assert len(held_out) == countdown.HELD_OUT and len(two) + len(three) + len(held_out) == 1777
    assert len({*two, *three, *held_out}) == 1777  # so none is held out and learned
    for numbers, target in (*two, *three, *held_out):
        assert list(numbers) == sorted(numbers) and numbers[0] >= 1 and numbers[-1] <= countdown.LARGEST
        assert 1 <= target <= countdown.LARGEST_VALUE and target not in numbers
        text = written(Puzzle(numbers, target))
        assert target in reachable(numbers) and answer_value(text, list(numbers)) == target
        assert len(text) < countdown.LONGEST == limit
    assert {len(numbers) for numbers, _ in two} == {2} and {len(n) for n, _ in (*three, *held_out)} == {3}
    assert Puzzle((2, 3, 7), 10) not in (*three, *held_out)  # 7+3


def test_the_warm_start_shows_every_puzzle_but_the_held_out_ones():
    two, three, held_out = puzzles_by_level()
    rows = countdown.examples()
    assert len(rows) == len(two) + len(three) and rows[-1]["completion"] == written(three[-1])
    assert not {to_row(puzzle, None)["prompt"] for puzzle in held_out} & {row["prompt"] for row in rows}


def test_the_warm_start_ends_when_enough_answers_are_right(monkeypatch):
    """A policy with random weights knows none: the test looks, and says no, until nothing is asked of it."""
    model, tokenizer = countdown.make_model(0)
    policy = prepare(model, False, False)
    monkeypatch.setattr(countdown, "CHECK_PROMPTS", 2)
    monkeypatch.setattr(countdown, "LONGEST", 4)
    assert not countdown.enough(policy, tokenizer)(countdown.CHECKS["first"])
    monkeypatch.setattr(countdown, "ENOUGH", 0)
    assert countdown.enough(policy, tokenizer)(countdown.CHECKS["first"])


def test_prompts_follow_the_tokenizer():
    puzzle = Puzzle((2, 3, 7), 20)
    short = {"prompt": "2 3 7=20:", "nums": [2, 3, 7], "target": 20}
    _, own = countdown.make_model(0)
    assert to_row(puzzle, None) == to_row(puzzle, own) == short
    assert own.decode(own(short["prompt"])["input_ids"]) == short["prompt"]
    plain = to_row(puzzle, tiny.tokenizer())["prompt"]
    assert plain.startswith("Using the numbers [2, 3, 7], create an equation that equals 20.") and plain.endswith("\n")
    (message,) = to_row(puzzle, tiny.tokenizer(chat=True))["prompt"]
    assert message == {"role": "user", "content": plain.rstrip("\n")}


def test_the_curriculum_goes_from_two_numbers_to_three():
    task = countdown.build(GRPOConfig(task="countdown"), None)
    source = task.train()
    assert isinstance(source, Curriculum) and len(source) == 1334
    counts = [len(row["nums"]) for row in source.take(2 * 143)]
    assert (counts.count(2), counts.count(3)) == (143, 143)
    for _ in range(Curriculum.WINDOW):
        source.observe(countdown.THRESHOLD)
    assert {len(row["nums"]) for row in source.take(300)} == {3}
    assert len(task.test()) == countdown.HELD_OUT
    assert [function.__name__ for function in task.reward_funcs] == ["correctness", "format_reward"]


def test_data_sets_are_refused():
    with pytest.raises(ValueError, match="task=countdown makes its own data; use dataset_name with --task gsm8k"):
        countdown.build(GRPOConfig(task="countdown", dataset_name="x"), None)


def run(tmp_path, flags):
    argv = f"--task countdown --device cpu --output_dir {tmp_path / 'run'} --logging_steps 1 {flags}".split()
    assert train.main(argv) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    return rows, samples, json.loads((tmp_path / "run" / "summary.json").read_text())


def test_two_steps_of_its_own_model(tmp_path, monkeypatch, without_curves):
    """The recipe, with a warm start of a few steps."""
    monkeypatch.setitem(countdown.WARM_START, "steps", 4)
    flags = "--max_steps 2 --prompts_per_step 4 --num_generations 4 --max_completion_length 12 --max_eval_samples 8"
    rows, samples, summary = run(tmp_path, flags)
    assert summary["steps"] == 2 and summary["accuracy_before"] is not None
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2] and all(row["curriculum/level"] == 0 for row in steps)
    assert {"rewards/correctness/mean", "rewards/format_reward/mean"} <= steps[0].keys()
    assert len(samples) == 2 * 4 * 4 and re.fullmatch(r"(\d+ )+\d+=\d+:|(\d+ )*\d+=\d+:", samples[0]["prompt"])


def test_a_step_of_a_language_model(tmp_path, without_curves):
    model = tiny.save(tmp_path / "model", chat=True)
    flags = f"--model_name_or_path {model} --max_steps 1 --prompts_per_step 2 --num_generations 2"
    _, samples, summary = run(tmp_path, flags + " --max_completion_length 4 --max_eval_samples 2")
    assert "Using the numbers [" in json.dumps(samples[0]["prompt"]) and summary["steps"] == 1


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="the recipe does not learn yet: docs/recipes/countdown.md")
def test_grpo_learns_to_solve_puzzles(tmp_path):
    """Greedy accuracy on held-out puzzles of three numbers, of the recipe as it stands."""
    _, _, summary = run(tmp_path, "")
    assert summary["accuracy_before"] < 0.3 and summary["accuracy_after"] >= 0.6
