"""A treasure hunt for a character model, with state over turns: each box holds the key of the next, the last one gold.

    k   ->   open(k)  ->  f    open(f)  ->  q    open(q)  ->  gold    take(q)

The prompt names the first box. The tool `open` returns what a box holds, if the model has its key. `take` ends the
dialogue. The reward is 1 if the model takes the box with the gold: the second, third or fourth.

The warm start shows correct calls, but most of its dialogues take a box before they find the gold. The model learns
from GRPO to open boxes until there is gold.
"""

import random
import string
from typing import TYPE_CHECKING

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data.responses import to_call
from fastgrpo.policy.characters import CHAT_TEMPLATE, character_model
from fastgrpo.run.curves import Panel
from fastgrpo.tasks import Task, refuse_data, shuffled

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST = 4  # boxes
HUNTS, HELD_OUT = 4000, 400
HUNTS_SEED = 0  # the same hunts are held out in every run
TAKEN = 0.6  # probability that an example takes the next box instead of opening it
CHARACTERS = string.ascii_lowercase + "()"
WARM_START = {"steps": 300, "batch_size": 32, "learning_rate": 3e-3}
PANELS = (
    Panel("Gold", "share of dialogues", ("accuracy", "eval/accuracy"), ("training", "held-out, greedy")),
    Panel("Calls", "calls per completion", ("tools/call_frequency",)),
    Panel("Completion length", "generated tokens", ("completions/mean_length",)),
    Panel("Entropy", "nats per token", ("entropy",)),
)


class Treasure:
    """The boxes of a hunt, and how many of them the model has a key for."""

    def reset(self, boxes: str) -> None:
        """Start with the key of the first box. Each of `boxes`, such as "kfq", holds the key of the next."""
        self.boxes, self.keys, self.found, self.done = boxes, 1, False, False

    def open(self, box: str) -> str:
        """Open a box.

        Args:
            box: Its letter.
        """
        if box not in self.boxes[: self.keys]:
            return "locked"
        at = self.boxes.index(box) + 1
        self.keys = max(self.keys, at + 1)
        return (*self.boxes, "gold")[at]

    def take(self, box: str) -> str:
        """Take a box, which ends the hunt.

        Args:
            box: Its letter.
        """
        self.found, self.done = box == self.boxes[-1], True
        return "gold" if self.found else "nothing"

    def get_reward(self) -> float:
        """Return 1.0 if the model has taken the gold."""
        return float(self.found)


def hunts() -> list[str]:
    """Make hunts without duplicates: two to `LONGEST` different letters."""
    rng, made = random.Random(HUNTS_SEED), {}
    while len(made) < HUNTS + HELD_OUT:
        made["".join(rng.sample(string.ascii_lowercase, rng.randint(2, LONGEST)))] = None
    return [*made]


def to_row(boxes: str) -> dict:
    """Make the row of a hunt."""
    return {"prompt": [{"role": "user", "content": boxes[0]}], "boxes": boxes}


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    """Train on hunts, and test on held-out ones."""
    refuse_data("treasure", config)
    rows = [to_row(boxes) for boxes in hunts()]
    train, test = rows[HELD_OUT:], rows[:HELD_OUT]
    return Task(lambda: shuffled(train, config), lambda: test, [], lambda: examples(config.seed), environment=Treasure)


def examples(seed: int) -> list[dict[str, list]]:
    """Write dialogues that open one box after another, and often take one without opening it."""
    rng, rows, hunt = random.Random(seed), [], Treasure()
    for boxes in hunts()[HELD_OUT:]:
        hunt.reset(boxes)
        messages, box, answer = to_row(boxes)["prompt"], boxes[0], ""
        while not hunt.done:
            name = "take" if answer == "gold" or (answer and rng.random() < TAKEN) else "open"
            messages.append({"role": "assistant", "content": "", "tool_calls": [to_call(name, {"box": box})]})
            answer = getattr(hunt, name)(box)
            messages.append({"role": "tool", "name": name, "content": answer})
            box = box if answer == "gold" else answer
        rows.append({"messages": messages[:-1]})
    return rows


def make_model(seed: int) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Make a 0.2M-parameter Llama over characters, with random weights."""
    model, tokenizer = character_model(CHARACTERS, seed, positions=128, initializer_range=0.08)  # learns to copy sooner
    tokenizer.chat_template = CHAT_TEMPLATE
    return model, tokenizer
