"""Small Python functions: a row lists operations, and the sandbox tests the function that performs them.

A row asks for three operations on x, each an addition, a subtraction or a product with a number from 1 to 9, done in
their order. Its tests call the function in the sandbox. Where a product follows a sum, Python needs brackets. The
`HELD_OUT` functions of the test set appear neither in the warm start nor in GRPO.

A language model is asked in words. Without --model_name_or_path the task has a small model of characters, which
continues `+2*3-4:` with a fenced block:

    def f(x):
     return (x+2)*3-4

The supervised warm start teaches the form, but most of its examples omit the brackets. So the programs run, and are
wrong if brackets are needed. GRPO, whose reward is the share of passing tests, learns the brackets.
"""

import functools
import itertools
import random
from typing import TYPE_CHECKING

from fastgrpo.config.sections import PromptConfig
from fastgrpo.policy.characters import END, character_model
from fastgrpo.rewards.sandbox import Sandbox
from fastgrpo.tasks import Task, as_prompt, refuse_data, shuffled

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STEPS = 3  # operations of a function
SIGNS = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}"}
ARGUMENTS = (1, 2, 7, -3)  # arguments of the tests
HELD_OUT, LEARNED = 300, 4096
FUNCTIONS_SEED = 0  # the same functions are held out in every run, so that runs can be compared
CAREFUL = 0.4  # share of the warm start's examples that set the brackets where they are needed
PROMPT = (
    "Write a Python function f(x) that does the following with x, in this order: {steps}. Return the result. Put the "
    "function into one fenced block:\n```python\ndef f(x):\n    return ...\n```"
)

CHARACTERS = "0123456789+-*:`defrtunx() \n"
WARM_START = {"steps": 1000, "batch_size": 64, "learning_rate": 5e-3}

Function = tuple[tuple[str, int], ...]  # each step's sign and number


def written(function: Function, careful: bool = True) -> str:
    """Write a completion in the form of the warm start."""
    expression, last = "x", "*"
    for sign, number in function:
        if careful and sign == "*" and last != "*":
            expression = f"({expression})"
        expression, last = f"{expression}{sign}{number}", sign
    return f"```\ndef f(x):\n return {expression}\n```"


def value(function: Function, x: int) -> int:
    """Compute a function."""
    for sign, number in function:
        x = {"+": x + number, "-": x - number, "*": x * number}[sign]
    return x


@functools.cache
def functions() -> tuple[list[Function], list[Function]]:
    """Draw functions with `FUNCTIONS_SEED`."""
    steps = list(itertools.product(SIGNS, range(1, 10)))
    drawn = random.Random(FUNCTIONS_SEED).sample(list(itertools.product(steps, repeat=STEPS)), LEARNED + HELD_OUT)
    return drawn[HELD_OUT:], drawn[:HELD_OUT]


def to_row(function: Function, tokenizer: "PreTrainedTokenizerBase | None") -> dict:
    """Make the row of a function."""
    if tokenizer is None or tokenizer.get_vocab().keys() == {END, *CHARACTERS}:
        prompt = "".join(f"{sign}{number}" for sign, number in function) + ":"
    else:
        steps = ", ".join(SIGNS[sign].format(number) for sign, number in function)
        prompt = as_prompt(PROMPT.format(steps=steps), tokenizer)
    return {"prompt": prompt, "tests": [{"assert": f"assert f({x}) == {value(function, x)}"} for x in ARGUMENTS]}


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    """Train on functions, and test on the held-out ones."""
    refuse_data("code", config)
    learned, held_out = functions()

    def rows(chosen):
        return [to_row(function, tokenizer) for function in chosen]

    return Task(lambda: shuffled(rows(learned), config), lambda: rows(held_out), [Sandbox()], examples)


def examples() -> list[dict[str, str]]:
    """Write each function that is not held out once, mostly without the required brackets."""
    rng = random.Random(FUNCTIONS_SEED)
    return [
        {"prompt": to_row(each, None)["prompt"], "completion": written(each, rng.random() < CAREFUL)}
        for each in functions()[0]
    ]


def make_model(seed: int) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Make a 0.13M-parameter Llama over the characters of functions, with random weights."""
    return character_model(CHARACTERS, seed, layers=2, heads=2)
