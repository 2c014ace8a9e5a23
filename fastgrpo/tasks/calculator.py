"""Word problems for a character model that cannot calculate, but can call a calculator.

    ann has 23 bags of 47 nuts and eats 58. how many   ->   calc(23*47-58)   ->   1023   ->   1023

The supervised warm start shows two ways to answer. Most examples write the right number at once, which the model
cannot learn. The others call the tool `calc` with the numbers of the problem, but with random operators, and repeat
its answer unless it is an error. GRPO rewards right numbers: it must find that calls are worth it, and which words mean which operator.

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

NAMES, THINGS = ("ann", "bob", "eve", "sam"), ("nuts", "eggs", "pens", "cups")
MORE, LESS = ("finds", "buys", "wins"), ("eats", "sells", "loses")
PROBLEMS, HELD_OUT = 4000, 500
PROBLEMS_SEED = 0  # the same problems are held out in every run
CALLED = 0.2  # share of the warm start's examples that call the tool
CHARACTERS = string.ascii_letters + string.digits + " .+-*/(){}':"
WARM_START = {"steps": 600, "batch_size": 64, "learning_rate": 3e-3}
PANELS = (
    Panel("Accuracy", "share correct", ("accuracy", "eval/accuracy"), ("accuracy", "held-out, greedy")),
    Panel("Calls", "calls per completion", ("tools/call_frequency",)),
    Panel("Failures", "share of calls that failed", ("tools/failure_frequency",)),
    Panel("Completion length", "drawn tokens", ("completions/mean_length",)),
    Panel("Entropy", "nats per token", ("entropy",)),
    Panel("Informative groups", "share of groups", ("frac_informative",)),
)


def calc(expression: str) -> str:
    """Calculate with whole numbers.

    Args:
        expression: Numbers with + - * / between them.
    """
    value = expression_value(expression, [])
    if value is None or value.denominator != 1:
        raise ValueError("not whole" if value is not None else "not readable")
    return str(value)


def correctness(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float]:
    """Reward a completion whose last message is the right number.

    Examples:
        >>> told = {"role": "assistant", "content": "1023"}
        >>> correctness(["?"] * 2, [[told], [told, {"role": "tool", "content": "1023"}]], ["1023"] * 2)
        [1.0, 0.0]
    """
    last = [messages[-1] for messages in completions]
    said = [message["content"] if message["role"] == "assistant" else None for message in last]
    return [float(text == value) for text, value in zip(said, answer, strict=True)]


def problems() -> list[dict[str, str]]:
    """Make word problems without duplicates, with the `expression` that solves each."""
    rng, made = random.Random(PROBLEMS_SEED), {}
    while len(made) < PROBLEMS + HELD_OUT:
        name, thing, more = rng.choice(NAMES), rng.choice(THINGS), rng.random() < 0.5
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        event, sign = f"and {rng.choice(MORE if more else LESS)}", "+" if more else "-"
        kind = rng.choice(("change", "bags", "share", "bags and change"))
        if kind == "change":
            words, expression = f"has {a + 9 * b} {thing} {event} {a}", f"{a + 9 * b}{sign}{a}"
        elif kind == "share":
            words, expression = f"splits {a * (b % 8 + 2)} {thing} among {b % 8 + 2}", f"{a * (b % 8 + 2)}/{b % 8 + 2}"
        elif kind == "bags":
            words, expression = f"has {a} bags of {b} {thing}", f"{a}*{b}"
        else:
            words, expression = f"has {a} bags of {b} {thing} {event} {c}", f"{a}*{b}{sign}{c}"
        made[f"{name} {words}. how many"] = expression
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
    """Write the dialogues of the warm start: right numbers, and calls with random operators."""
    rng, rows = random.Random(seed), []
    for problem in problems()[HELD_OUT:]:
        messages, said = to_row(**problem)["prompt"], calc(problem["expression"])
        if rng.random() < CALLED:
            call = {"expression": re.sub("[-+*/]", lambda _: rng.choice("+-*/"), problem["expression"])}
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
    model, tokenizer = character_model(CHARACTERS, seed, positions=192)
    tokenizer.chat_template = CHAT_TEMPLATE
    return model, tokenizer
