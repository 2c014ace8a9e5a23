"""The built-in example: a small character-level model learns to add two two-digit numbers, on any machine.

    47+38=7+8=15 4+3+1=8 85

The model writes the sum of the units, then the sum of the tens with the carry, then the result. Only the result is
rewarded. A short supervised warm start teaches the form and some of the sums. GRPO does the rest, on pairs whose units
have a carry. `HELD_OUT` of these pairs appear neither in the warm start nor in GRPO.
"""

import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data.prompts import to_prompt
from fastgrpo.policy.characters import character_model
from fastgrpo.rewards.answers import completion_text
from fastgrpo.tasks import Task, refuse_data, shuffled

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fastgrpo.policy.model import Policy

HELD_OUT = 500
PAIRS_SEED = 0  # the same pairs are held out in every run, so that runs can be compared
CHARACTERS = "0123456789+= "
WARM_START = {"steps": 340, "batch_size": 64, "learning_rate": 3e-3}
WARM_START_EXAMPLES = 8192
ENOUGH = 0.7  # greedy accuracy on sums with a carry at which the warm start ends
# The accuracy is checked on CHECK_PROMPTS training sums every CHECK_STEPS steps, but not before step CHECK_FROM. After
# fewer steps, the model of seed 8 gave some sums of tens so low a probability that GRPO did not learn them.
CHECK_FROM, CHECK_STEPS, CHECK_PROMPTS = 270, 10, 300
_FORM = re.compile(r"\d\+\d=\d+ \d\+\d(\+1)?=\d+ \d+")
# Share of the warm start's examples with a carry. With few of them, some sums of tens (such as even + even + 1) are so
# improbable after the warm start that no group has a correct completion, and GRPO never learns them.
CARRY_SHARE = 0.3


def correctness(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float]:
    """Reward a completion whose last number is the sum."""
    last = [completion_text(completion).split(" ")[-1] for completion in completions]
    return [float(text == value) for text, value in zip(last, answer, strict=True)]


def format_reward(prompts: list, completions: list, **columns: Any) -> list[float]:
    """Reward a completion in the form of the warm start, right or wrong.

    Examples:
        >>> format_reward(["47+38="] * 2, ["7+8=15 4+3+1=8 85", "85"])
        [1.0, 0.0]
    """
    return [float(_FORM.fullmatch(completion_text(completion)) is not None) for completion in completions]


def steps_reward(prompts: list, completions: list, **columns: Any) -> list[float]:
    """Reward a completion whose written steps and result are right.

    Examples:
        >>> steps_reward(["10+11="] * 2, ["0+1=1 1+1=2 21", "0+1=3 1+1=2 21"])
        [1.0, 0.0]
    """
    right = [written(*map(int, prompt[:-1].split("+"))) for prompt in prompts]
    return [float(completion_text(text) == steps) for text, steps in zip(completions, right, strict=True)]


def carry_pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the pairs of two-digit numbers whose units have a carry: those for training, and the held-out ones.

    No held-out pair is in training, in either order.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a % 10 + b % 10 >= 10]
    random.Random(PAIRS_SEED).shuffle(pairs)
    held_out = pairs[:HELD_OUT]
    orders = {frozenset(pair) for pair in held_out}  # 38+47 reveals 47+38
    return [pair for pair in pairs if frozenset(pair) not in orders], held_out


def to_row(a: int, b: int) -> dict[str, str]:
    """Make the row of a sum."""
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def written(a: int, b: int) -> str:
    """Write a sum in the form of the warm start: units, tens with the carry, result."""
    units = a % 10 + b % 10
    carry = "+1" if units >= 10 else ""
    return f"{a % 10}+{b % 10}={units} {a // 10}+{b // 10}{carry}={(a + b) // 10} {a + b}"


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    """Train on pairs with a carry, and test on the held-out ones."""
    refuse_data("arithmetic", config)
    train, test = ([to_row(*pair) for pair in part] for part in carry_pairs())
    rewards = [correctness, format_reward]
    return Task(lambda: shuffled(train, config), lambda: test, rewards, lambda: examples(config.seed), steps_reward)


def examples(seed: int) -> list[dict[str, str]]:
    """Draw written sums that show the form, some with a carry, and never a held-out pair."""
    rng = random.Random(seed)
    carry, _ = carry_pairs()
    plain = [(a, b) for a in range(10, 100) for b in range(10, 100) if a % 10 + b % 10 < 10]
    rows = []
    for _ in range(WARM_START_EXAMPLES):
        a, b = rng.choice(carry if rng.random() < CARRY_SHARE else plain)
        rows.append({"prompt": f"{a}+{b}=", "completion": written(a, b)})
    return rows


def make_model(seed: int) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Make a 0.2M-parameter Llama over the characters of sums, with random weights."""
    return character_model(CHARACTERS, seed)


def enough(policy: "Policy", tokenizer: "PreTrainedTokenizerBase") -> Callable[[int], bool]:
    """Return a test that ends the warm start when greedy accuracy is high enough for GRPO."""
    from fastgrpo.rollout.engine import RolloutEngine
    from fastgrpo.rollout.sampling import SamplingParams

    carry, _ = carry_pairs()
    rows = [to_row(*pair) for pair in carry[:CHECK_PROMPTS]]
    ids, answers = [to_prompt(row, tokenizer).ids for row in rows], [row["answer"] for row in rows]
    engine = RolloutEngine(policy, max_num_seqs=len(rows))
    greedy = SamplingParams(temperature=0, max_tokens=28, stop_token_ids=(tokenizer.eos_token_id,))

    def look(step):
        if step < CHECK_FROM or step % CHECK_STEPS:
            return False
        texts = [tokenizer.decode(r.ids, skip_special_tokens=True) for r in engine.generate(ids, 1, greedy)]
        return sum(correctness(ids, texts, answers)) / len(rows) >= ENOUGH

    return look
