"""Word problems for a character model that cannot calculate, but can call a calculator.

    nuts per box and boxes: 231 47   ->   calc(231*47)   ->   10857   ->   10857

Most examples of the warm start write the right number at once, which the model does not learn. A fifth calls the tool
`calc` with the numbers of the problem, and repeats its answer unless it is an error. A third of these calls mixes up +
with -, and * with /. GRPO rewards right numbers: the model finds that calls help, and which operator is right.

The control is the same model without the tool: --max_tool_calling_iterations 0.
"""

import random
import re
import string
from typing import TYPE_CHECKING, Any

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data.responses import to_call
from fastgrpo.policy.characters import CHAT_TEMPLATE, character_model
from fastgrpo.rewards.countdown import expression_value
from fastgrpo.run.curves import Panel
from fastgrpo.tasks import Task, refuse_data, shuffled
from fastgrpo.tools.calls import error_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

THINGS = ("nuts", "eggs", "pens", "cups", "bags", "jars")
EVENTS = {  # by operator
    "+": ("had and found", "had and gained"),
    "-": ("had and spent", "had and lost"),
    "*": ("per box and boxes", "per day and days"),
    "/": ("and boxes to fill", "and crates to fill"),
}
MIXED_UP = {"+": "-", "-": "+", "*": "/", "/": "*"}
PROBLEMS, HELD_OUT = 4000, 500
PROBLEMS_SEED = 0  # the same problems are held out in every run
CALLED = 1 / 5  # share of the warm start's examples that call the tool
RIGHT = 2 / 3  # share of these with the right operator
CHARACTERS = string.ascii_letters + string.digits + " .+-*/(){}':"
WARM_START = {"steps": 450, "batch_size": 32, "learning_rate": 3e-3}
PANELS = (
    Panel("Accuracy", "share correct", ("accuracy", "eval/accuracy"), ("accuracy", "held-out, greedy")),
    Panel("Calls", "calls per completion", ("tools/call_frequency",)),
    Panel("Failures", "share of calls that failed", ("tools/failure_frequency",)),
    Panel("Completion length", "generated tokens", ("completions/mean_length",)),
    Panel("Entropy", "nats per token", ("entropy",)),
    Panel("Informative groups", "share of groups whose rewards differ", ("frac_informative",)),
)


def calc(expression: str) -> str:
    """Calculate with whole numbers. The answer has five digits.

    Args:
        expression: Numbers with + - * / between them.
    """
    value = expression_value(expression, [])
    if value is None or value.denominator != 1:
        raise ValueError("not whole" if value is not None else "not readable")
    return f"{value.numerator:05}"


def correctness(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float]:
    """Reward a completion whose last message is the right number.

    Examples:
        >>> told = {"role": "assistant", "content": "10857"}
        >>> correctness(["?"] * 2, [[told], [told, {"role": "tool", "content": "10857"}]], ["10857"] * 2)
        [1.0, 0.0]
    """
    last = [messages[-1] for messages in completions]
    said = [message["content"] if message["role"] == "assistant" else None for message in last]
    return [float(text == value) for text, value in zip(said, answer, strict=True)]


def problems() -> list[dict[str, str]]:
    """Make word problems without duplicates, with the `expression` that solves each."""
    rng, made = random.Random(PROBLEMS_SEED), {}
    while len(made) < PROBLEMS + HELD_OUT:
        (sign, events), a, b = rng.choice([*EVENTS.items()]), rng.randint(100, 999), rng.randint(11, 99)
        a -= a % b if sign == "/" else 0
        if a >= 100:
            made[f"{rng.choice(THINGS)} {rng.choice(events)}: {a} {b}"] = f"{a}{sign}{b}"
    return [{"question": question, "expression": expression} for question, expression in made.items()]


def to_row(question: str, expression: str) -> dict[str, Any]:
    """Make the row of a problem."""
    return {"prompt": [{"role": "user", "content": question}], "answer": calc(expression)}


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    """Train on problems, and test on held-out ones."""
    refuse_data("calculator", config)
    rows = [to_row(**problem) for problem in problems()]
    train, test = rows[HELD_OUT:], rows[:HELD_OUT]
    return Task(
        lambda: shuffled(train, config), lambda: test, [correctness], lambda: examples(config.seed), tools=[calc]
    )


def examples(seed: int) -> list[dict[str, list]]:
    """Write the dialogues of the warm start: right numbers, and calls that often mix up operators."""
    rng, rows = random.Random(seed), []
    for problem in problems()[HELD_OUT:]:
        messages, said = to_row(**problem)["prompt"], calc(problem["expression"])
        if rng.random() < CALLED:
            call = {"expression": problem["expression"]}
            if rng.random() > RIGHT:
                call = {"expression": re.sub("[-+*/]", lambda sign: MIXED_UP[sign[0]], problem["expression"])}
            try:
                said = answer = calc(**call)
            except ValueError as error:
                answer = error_text(error)
            messages.append({"role": "assistant", "content": "", "tool_calls": [to_call("calc", call)]})
            messages.append({"role": "tool", "name": "calc", "content": answer})
        rows.append({"messages": [*messages, {"role": "assistant", "content": said}]})
    return rows


def make_model(seed: int) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Make a 0.2M-parameter Llama over characters, with random weights."""
    model, tokenizer = character_model(CHARACTERS, seed, positions=192, initializer_range=0.08)  # learns to copy sooner
    tokenizer.chat_template = CHAT_TEMPLATE
    return model, tokenizer
