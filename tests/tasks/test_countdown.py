"""Countdown: its puzzles, what the warm start shows of them, and whole runs of it."""

import collections
import functools
import itertools
import json
import random
import re
from fractions import Fraction

import pytest
import tiny

from fastgrpo import train
from fastgrpo.config.recipe import parse
from fastgrpo.config.settings import TrainConfig
from fastgrpo.data.sources import Curriculum
from fastgrpo.rewards.countdown import answer_value
from fastgrpo.tasks import countdown
from fastgrpo.tasks.countdown import Puzzle, Try, puzzles_by_level, to_row, tries, written


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


def test_tries_of_two_numbers():
    assert tries((3, 6)) == (
        Try("6+3", ("6+3=9",), 9),
        Try("6-3", ("6-3=3",), 3),
        Try("6*3", ("6*3=18",), 18),
        Try("6/3", ("6/3=2",), 2),
    )
    assert [each.value for each in tries((4, 4))] == [8, 16, 1]  # 0 is too small
    assert [each.value for each in tries((7, 10))] == [17, 3]  # 70 is too large, and 10/7 is no whole number


def test_tries_of_three_numbers():
    by_value = {each.value: each for each in tries((2, 3, 7))}
    assert by_value[20] == Try("(7+3)*2", ("7+3=10", "10*2=20"), 20)
    assert by_value[1] == Try("7-(3*2)", ("3*2=6", "7-6=1"), 1)  # the larger number stands first
    for numbers in itertools.combinations_with_replacement(range(1, countdown.LARGEST + 1), 3):
        found = tries(numbers)
        assert len({each.value for each in found}) == len(found)
        for each in found:
            assert answer_value(f"<answer>{each.expression}</answer>", list(numbers)) == each.value
            assert len(each.steps) == 2 and each.steps[1].endswith(f"={each.value}")
            for step in each.steps:
                operation, value = step.split("=")
                operands = [int(number) for number in re.findall(r"\d+", operation)]
                assert answer_value(f"<answer>{operation}</answer>", operands) == int(value)
                assert 1 <= int(value) <= countdown.LARGEST_VALUE and operands == sorted(operands, reverse=True)


def test_what_the_warm_start_shows():
    """A patient example goes on until the right try; another one answers its first try, if that is wrong."""
    puzzle, numbers = Puzzle((2, 3, 7), 20), [2, 3, 7]
    ways = tries(puzzle.numbers)
    steps = [",".join(each.steps) for each in ways]
    target = steps.index("7+3=10,10*2=20")
    shown = [written(puzzle, random.Random(seed)) for seed in range(400)]
    patient = []
    for text in shown:
        places = [steps.index(each) for each in re.split("[;!]", text)[:-1]]
        assert places == [(places[0] + i) % len(ways) for i in range(len(places))]  # the first follows the last
        right = places[-1] == target
        assert (answer_value(text, numbers) == puzzle.target) == right == ("!" in text)
        assert right or len(places) == 1
        assert text.endswith(f"{';!'[right]}<answer>{ways[places[-1]].expression}</answer>")
        if places[0] != target:
            patient.append(right)
    assert abs(sum(patient) / len(patient) - countdown.PATIENT) < 0.1
    assert {text.count(";") for text in shown if "!" in text} == set(range(len(ways)))
    with pytest.raises(ValueError, match="no solution"):
        written(Puzzle((3, 7), 5), random.Random(0))


def test_puzzles_need_all_of_their_numbers():
    limit = parse(["--task", "countdown"]).max_completion_length
    two, three, held_out = puzzles_by_level()
    assert len(held_out) == countdown.HELD_OUT and len(two) + len(three) + len(held_out) == 1777
    assert len({*two, *three, *held_out}) == 1777  # so none is held out and learned
    for numbers, target in (*two, *three, *held_out):
        assert list(numbers) == sorted(numbers) and numbers[0] >= 1 and numbers[-1] <= countdown.LARGEST
        assert 1 <= target <= countdown.LARGEST_VALUE and target not in numbers
        ways = tries(numbers)
        place = [each.value for each in ways].index(target)
        assert target in reachable(numbers)
        searched = "".join(
            f"{','.join(each.steps)};" for each in ways
        )  # from the try behind the right one, all of them
        assert len(f"{searched}<answer>{ways[place].expression}</answer>") < limit
    assert {len(numbers) for numbers, _ in two} == {2} and {len(n) for n, _ in (*three, *held_out)} == {3}
    assert Puzzle((2, 3, 7), 10) not in (*three, *held_out)  # 7+3


def test_the_warm_start_shows_every_puzzle_but_the_held_out_ones():
    two, three, _ = puzzles_by_level()
    counts = collections.Counter(row["prompt"] for row in countdown.examples())
    expected = {to_row(puzzle, None)["prompt"]: countdown.SHOWN for puzzle in three}
    expected |= {to_row(puzzle, None)["prompt"]: 2 * countdown.SHOWN for puzzle in two}
    assert counts == expected


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
    task = countdown.build(TrainConfig(task="countdown"), None)
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
        countdown.build(TrainConfig(task="countdown", dataset_name="x"), None)


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
def test_grpo_learns_to_try_on(tmp_path):
    """Greedy accuracy on held-out puzzles of three numbers, and the length of what is sampled."""
    rows, _, summary = run(tmp_path, "--seed 0")
    assert summary["accuracy_before"] < 0.3 and summary["accuracy_after"] >= 0.6
    lengths = [row["completions/mean_length"] for row in rows if "reward" in row]
    assert lengths[-1] > 1.5 * lengths[0]
