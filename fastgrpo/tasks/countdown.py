"""Countdown: reach a number from given numbers with + - * /, each number used at most once.

A puzzle has two or three numbers from 1 to `LARGEST`, which may be equal, and a target. All of its numbers together
reach the target through whole numbers from 1 to `LARGEST_VALUE`, and fewer of them do not. The task has all 1,777 such
puzzles. `HELD_OUT` of those with three numbers are tested on: none of them, as numbers with their target, appears in
the warm start or in GRPO, which goes from two numbers to three.

A language model gets the puzzle in words. Without --model_name_or_path the task brings a small model of characters,
which continues `2 3 7=20:` by

    7:13 27,5 1 6;3:17 23,9 5 14;2:18 22 10 40,10 4 21;<answer>(7+3)*2</answer>

It goes through the numbers from the largest one down. Behind each number it writes what the other two would have to
make, and behind the comma what they do make. Where both have a number in common, 10 here, it answers. The warm start
shows this on the puzzles that are not held out, and ends when `ENOUGH` of the answers are right: the form is known by
then, and much of the arithmetic is wrong. GRPO rewards right answers, and not how they were found.
"""

import functools
import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data import Curriculum, Level, ShuffledRows
from fastgrpo.policy.characters import END, character_model
from fastgrpo.policy.model import Policy
from fastgrpo.rewards.countdown import correctness, format_reward
from fastgrpo.tasks import Task, refuse_data
from fastgrpo.tasks.probe import reaches

LARGEST, LARGEST_VALUE = 10, 50
HELD_OUT = 300
PUZZLES_SEED = 0  # the same puzzles are held out in every run, so that runs can be compared
THRESHOLD = 0.5  # accuracy at which the curriculum goes on to three numbers alone
PROMPT = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use the operations + - * / and "
    "brackets, and each number at most once. Show your work inside <think> and </think>, then give the expression "
    "inside <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."
)

CHARACTERS = "0123456789+-*/=:,;() <answer>"  # each counts once
MODEL = {"hidden_size": 64, "layers": 3, "positions": 128}
WARM_START = {"steps": 1000, "batch_size": 32, "learning_rate": 3e-3}
ENOUGH = 0.25  # greedy accuracy on CHECK_PROMPTS puzzles of three numbers at which the warm start ends
CHECK_PROMPTS = 100
CHECKS = {"first": 200, "every": 20}  # the steps at which the accuracy is looked at
LONGEST = 90  # tokens of a completion


class Puzzle(NamedTuple):
    """What is given.

    Attributes:
        numbers: The numbers in ascending order.
        target: The number to reach.
    """

    numbers: tuple[int, ...]
    target: int


def made(a: int, b: int) -> dict[int, str]:
    """List what two numbers make.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their sum, difference, product and quotient as far as they are whole numbers from 1 to `LARGEST_VALUE`. Each has
        an expression, which begins with the larger number.
    """
    small, large = sorted((a, b))
    return _in_range(
        (large + small, f"{large}+{small}"),
        (large - small, f"{large}-{small}"),
        (large * small, f"{large}*{small}"),
        (_quotient(large, small), f"{large}/{small}"),
    )


def needed(target: int, number: int) -> dict[int, str]:
    """List what makes a target together with a number.

    Args:
        target: The number to reach.
        number: The number at hand.

    Returns:
        Whole numbers from 1 to `LARGEST_VALUE`. Each has the expression that is the target, with {} in its own place.
    """
    return _in_range(
        (abs(target - number), f"{{}}+{number}" if target > number else f"{number}-{{}}"),
        (target + number, f"{{}}-{number}"),
        (_quotient(target, number), f"{{}}*{number}"),
        (target * number, f"{{}}/{number}"),
        (_quotient(number, target), f"{number}/{{}}"),
    )


def _quotient(a: int, b: int) -> int:
    """Return the quotient if it is a whole number, else 0."""
    return 0 if a % b else a // b


def _in_range(*found: tuple[int, str]) -> dict[int, str]:
    """Keep the numbers from 1 to `LARGEST_VALUE`, and the first expression of each."""
    kept = {}
    for value, expression in found:
        if 1 <= value <= LARGEST_VALUE:
            kept.setdefault(value, expression)
    return kept


def written(puzzle: Puzzle) -> str | None:
    """Solve a puzzle, and write it out as the warm start teaches it.

    Args:
        puzzle: Two or three numbers and a target.

    Returns:
        The text. None where the numbers, all of them together, do not reach the target.
    """
    if len(puzzle.numbers) == 2:
        values = made(*puzzle.numbers)
        return f"{_listed(values)};{_answer(values[puzzle.target])}" if puzzle.target in values else None
    text = ""
    for number in sorted(set(puzzle.numbers), reverse=True):
        others = list(puzzle.numbers)
        others.remove(number)
        wanted, values = needed(puzzle.target, number), made(*others)
        text += f"{number}:{_listed(wanted)},{_listed(values)};"
        for value in values:
            if value in wanted:
                return text + _answer(wanted[value].format(f"({values[value]})"))
    return None


def _listed(values):
    return " ".join(map(str, values))


def _answer(expression):
    return f"<answer>{expression}</answer>"


@functools.cache
def puzzles_by_level() -> tuple[list[Puzzle], ...]:
    """Make all puzzles, in an order drawn from `PUZZLES_SEED`.

    Returns:
        Three lists: puzzles of two numbers; those of three to learn from; the held-out ones of three.
    """
    levels = []
    for count in (2, 3):
        groups = itertools.combinations_with_replacement(range(1, LARGEST + 1), count)
        puzzles = [Puzzle(numbers, target) for numbers in groups for target in range(1, LARGEST_VALUE + 1)]
        level = [puzzle for puzzle in puzzles if written(puzzle) and puzzle.target not in _with_fewer(puzzle.numbers)]
        random.Random(PUZZLES_SEED).shuffle(level)
        levels.append(level)
    two, three = levels
    return two, three[HELD_OUT:], three[:HELD_OUT]


@functools.cache
def _with_fewer(numbers):
    """Find what some of the numbers reach, but not all of them: one of them, or two of three."""
    pairs = itertools.combinations(numbers, 2) if len(numbers) == 3 else ()
    return set(numbers).union(*(made(*pair) for pair in pairs))


def to_row(puzzle: Puzzle, tokenizer: PreTrainedTokenizerBase | None) -> dict:
    """Make the row of a puzzle.

    Args:
        puzzle: The puzzle.
        tokenizer: The policy's tokenizer. None or that of the task's own model gives the short prompt; others give one
            in words, which is a message if the tokenizer has a chat template, and plain text otherwise.

    Returns:
        A dict with `prompt`, and with `nums` and `target` for the rewards.
    """
    numbers, target = list(puzzle.numbers), puzzle.target
    if tokenizer is None or tokenizer.get_vocab().keys() == {END, *CHARACTERS}:
        prompt = f"{' '.join(map(str, numbers))}={target}:"
    else:
        words = PROMPT.format(numbers=numbers, target=target)
        prompt = f"{words}\n" if tokenizer.chat_template is None else [{"role": "user", "content": words}]
    return {"prompt": prompt, "nums": numbers, "target": target}


def build(config: PromptConfig, tokenizer: PreTrainedTokenizerBase | None) -> Task:
    """Train on the puzzles level by level, and test on the held-out ones.

    Args:
        config: The settings. `Task.train` needs a `GRPOConfig`.
        tokenizer: The policy's tokenizer, see `to_row`.

    Returns:
        The task, with rewards for the answer and for its form.

    Raises:
        ValueError: A setting for data sets is given. This task makes its own data and would not read it.
    """
    refuse_data("countdown", config)
    two, three, held_out = puzzles_by_level()

    def source(puzzles):
        rows = [to_row(puzzle, tokenizer) for puzzle in puzzles]
        return ShuffledRows(rows, seed=config.seed, shuffle=config.shuffle_dataset)

    def train():
        # Half of the first level has three numbers, because a policy that never sees them unlearns them.
        mixed = Level("two or three numbers", source([*two, *three[: len(two)]]), THRESHOLD)
        return Curriculum([mixed, Level("three numbers", source(three))])

    rewards = [correctness, format_reward]
    return Task(train, lambda: [to_row(p, tokenizer) for p in held_out], rewards, examples)


def examples() -> list[dict[str, str]]:
    """Write out every puzzle that is not held out.

    Returns:
        Rows with `prompt` and `completion`.
    """
    two, three, _ = puzzles_by_level()
    return [{"prompt": to_row(puzzle, None)["prompt"], "completion": written(puzzle)} for puzzle in [*two, *three]]


def make_model(seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make a 0.2M-parameter Llama over the characters of puzzles, with random weights.

    Args:
        seed: Seed of the weights.

    Returns:
        The model and its tokenizer.
    """
    return character_model("".join(dict.fromkeys(CHARACTERS)), seed, **MODEL)


def enough(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> Callable[[int], bool]:
    """Make the test whether the warm start may end, because GRPO can learn the rest.

    Args:
        policy: The policy that is taught.
        tokenizer: Its tokenizer.

    Returns:
        A function of the number of steps done. It looks at puzzles of three numbers that are not held out.
    """
    _, three, _ = puzzles_by_level()
    rows = [to_row(puzzle, tokenizer) for puzzle in three[:CHECK_PROMPTS]]
    return reaches(ENOUGH, policy, tokenizer, rows, correctness, max_tokens=LONGEST, **CHECKS)
