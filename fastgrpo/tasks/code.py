"""Small Python functions, written from examples of what they return and judged by running them in the sandbox.

A function is `a*x+b` or `a*x*x+b` with whole numbers. A row shows what it returns for 1, 2 and 3, and its tests also
call it with other numbers, so a program that lists what was shown fails. `HELD_OUT` functions are tested on: they
appear neither in the warm start nor in GRPO.

A language model is asked in words. Without --model_name_or_path the task brings a small model of characters, which
continues `5 7 9:` with a fenced block:

    def f(x):
     return 2*x+3

A supervised warm start teaches the form, and ends when `ENOUGH` of the functions are right. GRPO does the rest: its
reward is the share of tests that pass.
"""

import functools
import random
from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data import ShuffledRows
from fastgrpo.evaluation.probe import reaches
from fastgrpo.policy.characters import END, character_model
from fastgrpo.policy.model import Policy
from fastgrpo.rewards.answers import completion_text
from fastgrpo.rewards.sandbox import Sandbox
from fastgrpo.tasks import Task, refuse_data

SHOWN, HIDDEN = (1, 2, 3), (5, 12)  # arguments of the examples in the prompt, and of the further tests
HELD_OUT = 200
FUNCTIONS_SEED = 0  # the same functions are held out in every run, so that runs can be compared
PROMPT = (
    "Write a Python function f(x) with one line in its body, such that {examples}. It must also be right for other whole "
    "numbers. Put the function into one fenced block:\n```python\ndef f(x):\n    return ...\n```"
)

CHARACTERS = "0123456789+-*:`defrtunx() \n"
MODEL = {"hidden_size": 64, "layers": 3, "positions": 64}
WARM_START = {"steps": 900, "batch_size": 64, "learning_rate": 3e-3}
ENOUGH = 0.4  # greedy accuracy on functions of GRPO's at which the warm start ends, because GRPO can learn from there
CHECK_FROM, CHECK_STEPS, CHECK_FUNCTIONS = 100, 20, 200


class Function(NamedTuple):
    """A function of x.

    Attributes:
        factor: What the power of x is multiplied by.
        power: 1 or 2.
        term: What is added.
    """

    factor: int
    power: int
    term: int

    def __call__(self, x: int) -> int:
        """Compute it.

        Args:
            x: The argument.

        Returns:
            The value.
        """
        return self.factor * x**self.power + self.term


@functools.cache
def functions() -> tuple[list[Function], list[Function]]:
    """List all functions, in an order drawn from `FUNCTIONS_SEED`.

    Returns:
        Those to learn from, and the held-out ones.
    """
    terms = range(-20, 21)
    all_of_them = [Function(factor, 1, term) for factor in range(2, 21) for term in terms]
    all_of_them += [Function(factor, 2, term) for factor in range(1, 6) for term in terms]
    random.Random(FUNCTIONS_SEED).shuffle(all_of_them)
    return all_of_them[HELD_OUT:], all_of_them[:HELD_OUT]


def written(function: Function) -> str:
    """Write a completion as the warm start shows it.

    Args:
        function: The function.

    Returns:
        A fenced block with its program.
    """
    factor = "" if function.factor == 1 else f"{function.factor}*"
    term = f"{function.term:+d}" if function.term else ""
    return f"```\ndef f(x):\n return {factor}{'*'.join('x' * function.power)}{term}\n```"


def to_row(function: Function, tokenizer: PreTrainedTokenizerBase | None) -> dict:
    """Make the row of a function.

    Args:
        function: The function.
        tokenizer: The policy's tokenizer. None or that of the task's own model gives the short prompt; others give one
            in words, which is a message if the tokenizer has a chat template, and plain text otherwise.

    Returns:
        A dict with `prompt` and `tests`.
    """
    values = [function(x) for x in SHOWN]
    if tokenizer is None or tokenizer.get_vocab().keys() == {END, *CHARACTERS}:
        prompt = f"{' '.join(map(str, values))}:"
    else:
        words = PROMPT.format(examples=", ".join(f"f({x}) == {y}" for x, y in zip(SHOWN, values, strict=True)))
        prompt = f"{words}\n" if tokenizer.chat_template is None else [{"role": "user", "content": words}]
    tests = [{"assert": f"assert f({x}) == {function(x)}"} for x in (*SHOWN, *HIDDEN)]
    return {"prompt": prompt, "tests": tests}


def build(config: PromptConfig, tokenizer: PreTrainedTokenizerBase | None) -> Task:
    """Train on functions, and test on the held-out ones.

    Args:
        config: The settings. `Task.train` needs a `GRPOConfig`.
        tokenizer: The policy's tokenizer, see `to_row`.

    Returns:
        The task. Its reward is the share of tests that pass in the sandbox.

    Raises:
        ValueError: A setting for data sets is given, which this task would not read, or this machine cannot run the
            sandbox.
    """
    refuse_data("code", config)
    known, held_out = functions()

    def train():
        rows = [to_row(function, tokenizer) for function in known]
        return ShuffledRows(rows, seed=config.seed, shuffle=config.shuffle_dataset)

    return Task(train, lambda: [to_row(function, tokenizer) for function in held_out], [Sandbox()], examples)


def examples() -> list[dict[str, str]]:
    """Write each function that is not held out.

    Returns:
        Rows with `prompt` and `completion`.
    """
    return [{"prompt": to_row(each, None)["prompt"], "completion": written(each)} for each in functions()[0]]


def make_model(seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make a 0.2M-parameter Llama over the characters of functions, with random weights.

    Args:
        seed: Seed of the weights.

    Returns:
        The model and its tokenizer.
    """
    return character_model(CHARACTERS, seed, **MODEL)


def enough(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> Callable[[int], bool]:
    """Make the test whether the warm start may end, because GRPO can learn the rest.

    Args:
        policy: The policy that is taught.
        tokenizer: Its tokenizer.

    Returns:
        A function of the number of steps done. It looks at the policy every `CHECK_STEPS` steps.
    """
    rows = [{"prompt": to_row(each, None)["prompt"], "expected": written(each)} for each in functions()[0]]

    def same(prompts, completions, expected):
        return [float(completion_text(text) == right) for text, right in zip(completions, expected, strict=True)]

    rows = rows[:CHECK_FUNCTIONS]
    return reaches(ENOUGH, policy, tokenizer, rows, same, max_tokens=40, first=CHECK_FROM, every=CHECK_STEPS)
