"""Countdown: its puzzles, what the warm start shows of them, and whole runs of it."""

import json
import re
from fractions import Fraction

import pytest
import tiny

from fastgrpo import train
from fastgrpo.config.recipe import parse
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.sources import Curriculum
from fastgrpo.rewards.countdown import answer_value
from fastgrpo.tasks import countdown
from fastgrpo.tasks.countdown import Puzzle, puzzles_by_level, to_row, ways


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
                    found |= reachable([value, *rest])
    return found


@pytest.mark.parametrize("numbers", [(3, 7), (7, 7), (2, 3, 7), (4, 4, 6), (2, 3, 7, 10)])
def test_every_way_is_right(numbers):
    found = ways(numbers)
    assert len(set(found)) == len(found) and {way.value for way in found} <= reachable(numbers)
    for way in found:
        assert answer_value(f"<answer>{way.expression}</answer>", list(numbers)) == way.value
        assert 0 < way.value <= countdown.LARGEST_VALUE
        steps = [re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step).groups() for step in way.steps.split()]
        assert len(steps) == len(numbers) - 1 and int(steps[-1][3]) == way.value
        for a, sign, b, value in steps:
            assert int(a) >= int(b)
            assert answer_value(f"<answer>{a}{sign}{b}</answer>", [int(a), int(b)]) == int(value)


def test_ways_of_two_numbers():
    assert [tuple(way) for way in ways((3, 6))] == [
        (9, "6+3=9", "6+3"), (3, "6-3=3", "6-3"), (18, "6*3=18", "6*3"), (2, "6/3=2", "6/3"),
    ]  # fmt: skip
    assert (20, "7+3=10 10*2=20", "(7+3)*2") in ways((2, 3, 7))


def test_puzzles_need_all_of_their_numbers():
    two, three, held_out = puzzles_by_level()
    assert len(held_out) == countdown.HELD_OUT and len(two) + len(three) + len(held_out) == 1351
    assert len({*two, *three, *held_out}) == 1351  # so none is held out and learned
    for numbers, target in (*two, *three, *held_out):
        assert list(numbers) == sorted(numbers) and numbers[0] >= 1 and numbers[-1] <= countdown.LARGEST
        assert 1 <= target <= countdown.LARGEST_VALUE and target not in numbers
        assert any(way.value == target for way in ways(numbers))
    assert {len(numbers) for numbers, _ in two} == {2} and {len(n) for n, _ in (*three, *held_out)} == {3}
    assert Puzzle((2, 3, 7), 10) not in (*three, *held_out)  # 7+3


def test_the_warm_start_shows_no_held_out_puzzle_and_its_computations_are_right():
    *_, held_out = puzzles_by_level()
    forbidden = {to_row(puzzle, None)["prompt"] for puzzle in held_out}
    rows = countdown.examples(seed=3)
    assert len(rows) == countdown.WARM_START_EXAMPLES and not forbidden & {row["prompt"] for row in rows}
    right = 0
    for row in rows[:500]:
        *numbers, target = map(int, re.findall(r"\d+", row["prompt"]))
        tries, answer = row["completion"].removesuffix("</answer>").split(" <answer>")
        values = {way.steps: way for way in ways(tuple(numbers))}
        tried = [values[steps.removesuffix(f",{target}")] for steps in tries.split(";")]  # ways of these numbers
        assert 1 <= len(tried) <= countdown.MOST_TRIES and answer == tried[-1].expression
        assert all(way.value != target for way in tried[:-1])
        right += tried[-1].value == target
    assert max(len(row["completion"]) for row in rows) < parse(["--task", "countdown"]).max_completion_length
    assert right / 500 == pytest.approx(countdown.SOLVED_SHARE, abs=0.07)
    assert rows == countdown.examples(seed=3) != countdown.examples(seed=4)


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
    assert isinstance(source, Curriculum) and len(source) == 933
    counts = [len(row["nums"]) for row in source.take(236)]
    assert (counts.count(2), counts.count(3)) == (118, 118)
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
    monkeypatch.setattr(countdown, "WARM_START_EXAMPLES", 256)
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
def test_grpo_learns_to_search(tmp_path):
    """Greedy accuracy on held-out puzzles of three numbers, of the recipe as it stands."""
    _, _, summary = run(tmp_path, "")
    assert summary["accuracy_before"] < 0.3 and summary["accuracy_after"] >= 0.6
