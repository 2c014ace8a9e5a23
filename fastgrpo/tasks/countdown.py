"""Countdown: reach a number from given numbers with + - * /, each number used at most once.

A puzzle has a target and two or three numbers from 1 to `LARGEST`, which may be equal. The target needs all of its
numbers. Every intermediate result is a whole number from 1 to `LARGEST_VALUE`. The task has all 1,777 such puzzles.
`HELD_OUT` puzzles with three numbers are the test set: none of them appears in the warm start or in GRPO. The
curriculum of GRPO goes from two numbers to three.

A language model gets the puzzle in words. Without --model_name_or_path the task brings a small model of characters,
which continues `2 3 7=20:` with one try after another, until a value is the target, and then answers:

    7+3=10,10+2=12;7+3=10,10-2=8;7+3=10,10*2=20!<answer>(7+3)*2</answer>

The warm start teaches form, arithmetic, order of the tries, and the mark `!` of the target. Nearly half of its examples
start with the right try, which a model cannot predict. Most others stop after one wrong try, and answer it. So the
model solves few puzzles. GRPO rewards only right answers, and the model learns to continue.
"""

import functools
import itertools
import random
from typing import TYPE_CHECKING, NamedTuple

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data import Curriculum, Level
from fastgrpo.policy.characters import END, character_model
from fastgrpo.rewards.countdown import correctness, format_reward
from fastgrpo.tasks import Task, as_prompt, refuse_data, shuffled

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LARGEST, LARGEST_VALUE = 10, 50
HELD_OUT = 300
PUZZLES_SEED = 0  # the same held-out puzzles and examples in every run, so that runs can be compared
THRESHOLD = 0.5  # accuracy from which all puzzles have three numbers
PROMPT = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use the operations + - * / and "
    "brackets, and each number at most once. Show your work inside <think> and </think>, then give the expression "
    "inside <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."
)

CHARACTERS = "0123456789+-*/=:,;!() <answer>"
WARM_START = {"steps": 1400, "batch_size": 32, "learning_rate": 3e-3}
PATIENT = 0.4  # share of the examples that continue after a wrong try; the others give it as the answer
SHOWN = 16  # examples per puzzle of three numbers; puzzles of two numbers are few, and have twice as many


class Puzzle(NamedTuple):
    """The numbers and the target of a puzzle."""

    numbers: tuple[int, ...]  # in ascending order
    target: int


class Try(NamedTuple):
    """One try to reach the target."""

    expression: str  # such as "(7+3)*2"
    steps: tuple[str, ...]  # such as ("7+3=10", "10*2=20"); empty for a single number
    value: int


@functools.cache
def tries(numbers: tuple[int, ...]) -> tuple[Try, ...]:
    """List expressions of all numbers, one for each value."""
    given = [Try(str(number), (), number) for number in numbers]
    if len(given) == 2:
        found = _joined(*given)
    else:
        found = []
        for i, third in enumerate(given):
            for pair in _joined(*given[:i], *given[i + 1 :]):
                found += _joined(pair._replace(expression=f"({pair.expression})"), third)
    first = {}
    for each in found:
        first.setdefault(each.value, each)
    return tuple(first.values())


def _joined(a: Try, b: Try) -> list[Try]:
    """Join two expressions by each operation that gives a whole number from 1 to `LARGEST_VALUE`."""
    large, small = sorted((a, b), key=lambda each: each.value, reverse=True)
    x, y = large.value, small.value
    values = {"+": x + y, "-": x - y, "*": x * y, "/": 0 if x % y else x // y}
    return [
        Try(f"{large.expression}{sign}{small.expression}", (*a.steps, *b.steps, f"{x}{sign}{y}={value}"), value)
        for sign, value in values.items()
        if 1 <= value <= LARGEST_VALUE
    ]


def written(puzzle: Puzzle, rng: random.Random) -> str:
    """Write a completion in the form of the warm start."""
    if puzzle.target not in _values(puzzle.numbers):
        raise ValueError(f"{puzzle} has no solution")
    listed = tries(puzzle.numbers)
    # Each try determines the next one: a model that has to guess learns the arithmetic later.
    right = next(i for i, each in enumerate(listed) if each.value == puzzle.target)
    wrong = int(len(listed) * rng.random() ** 3)  # tries before the right one; few, so that the mark is seen often
    if wrong and rng.random() >= PATIENT:
        each = listed[right - wrong]
        return f"{','.join(each.steps)};<answer>{each.expression}</answer>"
    shown = [listed[right - back] for back in range(wrong, -1, -1)]  # an index below 0 counts from the end
    text = ";".join(",".join(each.steps) for each in shown)
    return f"{text}!<answer>{shown[-1].expression}</answer>"


@functools.cache
def puzzles_by_level() -> tuple[list[Puzzle], ...]:
    """Make all puzzles, in an order drawn from `PUZZLES_SEED`."""
    levels = []
    for count in (2, 3):
        groups = itertools.combinations_with_replacement(range(1, LARGEST + 1), count)
        puzzles = [Puzzle(numbers, target) for numbers in groups for target in range(1, LARGEST_VALUE + 1)]
        level = [each for each in puzzles if each.target in _values(each.numbers) - _with_fewer(each.numbers)]
        random.Random(PUZZLES_SEED).shuffle(level)
        levels.append(level)
    two, three = levels
    return two, three[HELD_OUT:], three[:HELD_OUT]


@functools.cache
def _with_fewer(numbers):
    """Return the values that a proper subset of the numbers reaches."""
    pairs = itertools.combinations(numbers, 2) if len(numbers) == 3 else ()
    return set(numbers).union(*(_values(pair) for pair in pairs))


def _values(numbers):
    return {each.value for each in tries(numbers)}


def to_row(puzzle: Puzzle, tokenizer: "PreTrainedTokenizerBase | None") -> dict:
    """Make the row of a puzzle."""
    numbers, target = list(puzzle.numbers), puzzle.target
    if tokenizer is None or tokenizer.get_vocab().keys() == {END, *CHARACTERS}:
        prompt = f"{' '.join(map(str, numbers))}={target}:"
    else:
        prompt = as_prompt(PROMPT.format(numbers=numbers, target=target), tokenizer)
    return {"prompt": prompt, "nums": numbers, "target": target}


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    """Train on the puzzles level by level, and test on the held-out ones."""
    refuse_data("countdown", config)
    two, three, held_out = puzzles_by_level()

    def rows(puzzles):
        return [to_row(puzzle, tokenizer) for puzzle in puzzles]

    def train():
        # Half of the first level has three numbers, because a policy that never sees them unlearns them.
        mixed = Level("two or three numbers", shuffled(rows([*two, *three[: len(two)]]), config), THRESHOLD)
        return Curriculum([mixed, Level("three numbers", shuffled(rows(three), config))])

    return Task(train, lambda: rows(held_out), [correctness, format_reward], examples)


def examples() -> list[dict[str, str]]:
    """Write examples of each puzzle that is not held out."""
    two, three, _ = puzzles_by_level()
    rng = random.Random(PUZZLES_SEED)
    shown = [*two * 2, *three] * SHOWN
    return [{"prompt": to_row(each, None)["prompt"], "completion": written(each, rng)} for each in shown]


def make_model(seed: int) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Make a 0.2M-parameter Llama over the characters of puzzles, with random weights."""
    return character_model(CHARACTERS, seed, positions=320)
