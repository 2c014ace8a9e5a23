"""Countdown: reach a number from given numbers with + - * /, each number used at most once.

A puzzle has two or three numbers from 1 to `LARGEST`, which may be equal, and a target. All of its numbers together
reach the target through whole numbers from 1 to `LARGEST_VALUE`, and fewer of them do not. The task has all 1,351 such
puzzles. `HELD_OUT` of those with three numbers are tested on: none of them, as numbers with their target, appears in
the warm start or in GRPO, which goes from two numbers to three.

A language model gets the puzzle in words. Without --model_name_or_path the task brings a small model of characters,
which continues `2 3 7=20:` by

    3*2=6 7+6=13,20;7+3=10 10*2=20,20 <answer>(7+3)*2</answer>

It tries one way to combine the numbers after another, writes the target behind what it has reached, to compare them,
and answers the last one. The warm start shows ways that are drawn at random, and gives up early, so it teaches to
compute, to compare and to answer, and hardly how to search. GRPO rewards the answer alone.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.config.sections import PromptConfig
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data import Curriculum, Level, ShuffledRows
from fastgrpo.data.examples import to_examples
from fastgrpo.policy.characters import END, character_model
from fastgrpo.policy.model import Policy
from fastgrpo.rewards.countdown import correctness, format_reward
from fastgrpo.step.supervised import sft
from fastgrpo.tasks import Task

__all__ = ["build", "correctness", "examples", "format_reward", "make_model", "puzzles_by_level", "warm_start", "ways"]

LARGEST, LARGEST_VALUE = 9, 50
HELD_OUT = 300
PUZZLES_SEED = 0  # the same puzzles are held out in every run, so that runs can be compared
THRESHOLD = 0.4  # accuracy at which the curriculum goes on to three numbers alone
PROMPT = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use the operations + - * / and "
    "brackets, and each number at most once. Show your work inside <think> and </think>, then give the expression "
    "inside <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."
)

CHARACTERS = "0123456789+-*/=:,;() <answer>"  # each counts once
MODEL = {"hidden_size": 64, "layers": 3, "positions": 192}
WARM_START = {"steps": 1200, "batch_size": 32, "learning_rate": 3e-3}
WARM_START_EXAMPLES = 16384
TWO_SHARE = 0.2  # share of the warm start's examples with two numbers
RIGHT_SHARE = 0.2  # share of the tries in the warm start that are right, after which the example answers
GIVE_UP_SHARE = 0.55  # share of the wrong tries after which an example answers all the same
MOST_TRIES = 7  # of an example


class Puzzle(NamedTuple):
    """What is given.

    Attributes:
        numbers: The numbers in ascending order.
        target: The number to reach.
    """

    numbers: tuple[int, ...]
    target: int


class Way(NamedTuple):
    """A way to combine all of some numbers.

    Attributes:
        value: The number that it reaches.
        steps: One operation after another, such as 7+3=10 10*2=20.
        expression: All of them at once, such as (7+3)*2.
    """

    value: int
    steps: str
    expression: str


@functools.cache
def ways(numbers: tuple[int, ...]) -> list[Way]:
    """Find every way to combine numbers through whole numbers from 1 to `LARGEST_VALUE`.

    Args:
        numbers: The numbers, all of which are used.

    Returns:
        The ways. Of two numbers the larger one is written first.
    """
    return list(dict.fromkeys(_combined([Way(number, "", str(number)) for number in numbers])))


def _combined(parts: list[Way]) -> Iterator[Way]:
    """Yield the ways to combine parts, the first of which has the steps that were made so far."""
    if len(parts) == 1:
        yield parts[0]
        return
    for i, j in itertools.combinations(range(len(parts)), 2):
        small, large = sorted((parts[i], parts[j]), key=lambda part: part.value)
        (a, _, left), (b, _, right) = large, small
        rest = [part for k, part in enumerate(parts) if k not in (i, j)]
        for sign, value in (("+", a + b), ("-", a - b), ("*", a * b), ("/", 0 if a % b else a // b)):
            if 0 < value <= LARGEST_VALUE:
                steps = f"{parts[0].steps} {a}{sign}{b}={value}".strip()
                yield from _combined([Way(value, steps, f"{_bracketed(left)}{sign}{_bracketed(right)}"), *rest])


def _bracketed(expression: str) -> str:
    return expression if expression.isdigit() else f"({expression})"


@functools.cache
def puzzles_by_level() -> tuple[list[Puzzle], ...]:
    """Make all puzzles, in an order drawn from `PUZZLES_SEED`.

    Returns:
        Three lists: puzzles of two numbers; those of three to learn from; the held-out ones of three.
    """
    rng, levels = random.Random(PUZZLES_SEED), []
    for count in (2, 3):
        level = []
        for numbers in itertools.combinations_with_replacement(range(1, LARGEST + 1), count):
            subsets = (subset for n in range(1, count) for subset in itertools.combinations(numbers, n))
            with_fewer = {way.value for subset in subsets for way in ways(subset)}
            reached = {way.value for way in ways(numbers)} - with_fewer
            level += [Puzzle(numbers, target) for target in sorted(reached)]
        rng.shuffle(level)
        levels.append(level)
    two, three = levels
    return two, three[HELD_OUT:], three[:HELD_OUT]


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
    for name in ("dataset_name", "dataset_config", "system_prompt"):
        if getattr(config, name):
            raise ValueError(f"task=countdown makes its own data; use {name} with --task gsm8k or --task dataset")
    two, three, held_out = puzzles_by_level()

    def source(puzzles):
        rows = [to_row(puzzle, tokenizer) for puzzle in puzzles]
        return ShuffledRows(rows, seed=config.seed, shuffle=config.shuffle_dataset)

    def train():
        # Half of the first level has three numbers, because a policy that never sees them unlearns them.
        mixed = Level("two or three numbers", source([*two, *three[: len(two)]]), THRESHOLD)
        return Curriculum([mixed, Level("three numbers", source(three))])

    rewards = [correctness, format_reward]
    return Task(train, lambda: [to_row(p, tokenizer) for p in held_out], rewards, lambda: examples(config.seed))


def examples(seed: int) -> list[dict[str, str]]:
    """Draw examples that try ways at random and answer the last one, right or wrong. None has a held-out puzzle.

    Args:
        seed: Seed of the draws.

    Returns:
        Rows with `prompt` and `completion`.
    """
    rng, rows = random.Random(seed), []
    two, three, _ = puzzles_by_level()
    for _ in range(WARM_START_EXAMPLES):
        puzzle = rng.choice(two if rng.random() < TWO_SHARE else three)
        right, wrong = [], []
        for way in ways(puzzle.numbers):
            (right if way.value == puzzle.target else wrong).append(way)
        rng.shuffle(wrong)
        tries, done = [], False
        while not done:
            solved = rng.random() < RIGHT_SHARE or not wrong
            tries.append(rng.choice(right) if solved else wrong.pop())
            done = solved or rng.random() < GIVE_UP_SHARE or len(tries) == MOST_TRIES
        text = ";".join(f"{way.steps},{puzzle.target}" for way in tries) + f" <answer>{tries[-1].expression}</answer>"
        rows.append({"prompt": to_row(puzzle, None)["prompt"], "completion": text})
    return rows


def make_model(seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make a 0.2M-parameter Llama over the characters of puzzles, with random weights.

    Args:
        seed: Seed of the weights.

    Returns:
        The model and its tokenizer.
    """
    return character_model("".join(dict.fromkeys(CHARACTERS)), seed, **MODEL)


def warm_start(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, config: GRPOConfig, announce: Callable[[int, int, float], None]
) -> None:
    """Teach to compute, to compare and to answer, so that some answers are right.

    Args:
        policy: The policy with random weights.
        tokenizer: Its tokenizer.
        config: The settings of the run; its seed is used.
        announce: A function that is called with the step, the number of steps and the loss.
    """
    learned = [example for row in examples(config.seed) for example in to_examples(row, tokenizer)]

    def on_step(step, loss):
        announce(step, WARM_START["steps"], loss)

    sft(policy, learned, seed=config.seed, on_step=on_step, **WARM_START)
