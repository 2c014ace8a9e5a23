"""Countdown: puzzles, and examples of the warm start."""

import collections
import itertools
import re

import tiny

from fastgrpo.config.recipe import parse
from fastgrpo.config.settings import TrainConfig
from fastgrpo.data.sources import Curriculum
from fastgrpo.rewards.countdown import answer_value
from fastgrpo.tasks import countdown
from fastgrpo.tasks.countdown import Puzzle, Try, puzzles_by_level, to_row, tries


def test_lists_tries_for_each_value():
    two = [("6+3", "6+3=9", 9), ("6-3", "6-3=3", 3), ("6*3", "6*3=18", 18), ("6/3", "6/3=2", 2)]
    assert tries((3, 6)) == tuple(Try(expression, (step,), value) for expression, step, value in two)
    assert [each.value for each in tries((4, 4))] == [8, 16, 1]  # 0 is too small
    assert [each.value for each in tries((7, 10))] == [17, 3]  # 70 is too large, and 10/7 is no whole number
    by_value = {each.value: each for each in tries((2, 3, 7))}
    assert by_value[20] == Try("(7+3)*2", ("7+3=10", "10*2=20"), 20)
    assert by_value[1] == Try("7-(3*2)", ("3*2=6", "7-6=1"), 1)  # the larger number stands first
    for numbers in itertools.combinations_with_replacement(range(1, countdown.LARGEST + 1), 3):
        found = tries(numbers)
        assert len({each.value for each in found}) == len(found)
        for each in found:
            assert answer_value(f"<answer>{each.expression}</answer>", list(numbers)) == each.value
            assert len(each.steps) == 2 and each.steps[1].endswith(f"={each.value}")
            for operation, value in (step.split("=") for step in each.steps):
                operands = [int(number) for number in re.findall(r"\d+", operation)]
                assert answer_value(f"<answer>{operation}</answer>", operands) == int(value)
                assert 1 <= int(value) <= countdown.LARGEST_VALUE and operands == sorted(operands, reverse=True)


def test_puzzles_need_all_of_their_numbers():
    limit = parse(["--task", "countdown"]).max_completion_length
    two, three, held_out = puzzles_by_level()
    assert len(held_out) == countdown.HELD_OUT and len(two) + len(three) + len(held_out) == 1777
    assert len({*two, *three, *held_out}) == 1777  # so none is held out and learned
    for numbers, target in (*two, *three, *held_out):
        assert list(numbers) == sorted(numbers) and numbers[0] >= 1 and numbers[-1] <= countdown.LARGEST
        assert 1 <= target <= countdown.LARGEST_VALUE and target not in numbers
        ways = {each.value: each for each in tries(numbers)}
        searched = "".join(f"{','.join(each.steps)};" for each in ways.values())  # from behind the right one, all
        assert len(f"{searched}<answer>{ways[target].expression}</answer>") < limit
    assert {len(numbers) for numbers, _ in two} == {2} and {len(n) for n, _ in (*three, *held_out)} == {3}
    assert Puzzle((2, 3, 7), 10) not in (*three, *held_out)  # 7+3
    counts = collections.Counter(row["prompt"] for row in countdown.examples())  # of the warm start
    expected = {to_row(puzzle, None)["prompt"]: countdown.SHOWN for puzzle in three}
    assert counts == expected | {to_row(puzzle, None)["prompt"]: 2 * countdown.SHOWN for puzzle in two}


def test_prompts_follow_the_tokenizer():
    puzzle, short = Puzzle((2, 3, 7), 20), {"prompt": "2 3 7=20:", "nums": [2, 3, 7], "target": 20}
    _, own = countdown.make_model(0)
    assert to_row(puzzle, None) == to_row(puzzle, own) == short
    assert own.decode(own(short["prompt"])["input_ids"]) == short["prompt"]
    plain = to_row(puzzle, tiny.tokenizer())["prompt"]
    assert plain.startswith("Using the numbers [2, 3, 7], create an equation that equals 20.") and plain.endswith("\n")
    assert to_row(puzzle, tiny.tokenizer(chat=True))["prompt"] == [{"role": "user", "content": plain.rstrip("\n")}]


def test_the_curriculum_goes_from_two_numbers_to_three():
    task = countdown.build(TrainConfig(task="countdown"), None)
    source = task.train()
    assert isinstance(source, Curriculum) and len(source) == 1334 and len(task.test()) == countdown.HELD_OUT
    counts = [len(row["nums"]) for row in source.take(2 * 143)]
    assert (counts.count(2), counts.count(3)) == (143, 143)
    for _ in range(Curriculum.WINDOW):
        source.observe(countdown.THRESHOLD)
    assert {len(row["nums"]) for row in source.take(300)} == {3}
