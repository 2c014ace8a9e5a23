"""The built-in example: a small character-level model learns to add two two-digit numbers, on any machine.

    47+38=7+8=15 4+3+1=8 85

The model writes the sum of the units, then the sum of the tens with the carry, then the result. Only the result is
rewarded. A short supervised warm start teaches the form and some of the sums. GRPO does the rest, over a curriculum
whose levels are small numbers, larger numbers, and any two numbers whose sum has a carry. `HELD_OUT` pairs of the last
level appear neither in the warm start nor in GRPO.
"""

import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data import Curriculum, Level
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
ENOUGH = 0.36  # greedy accuracy on sums with a carry at which the warm start ends
# The accuracy is checked on CHECK_PROMPTS sums every CHECK_STEPS steps, but not before step CHECK_FROM, when the
# learning rate has come down.
CHECK_FROM, CHECK_STEPS, CHECK_PROMPTS = 240, 10, 300
_FORM = re.compile(r"\d\+\d=\d+ \d\+\d(\+1)?=\d+ \d+")
CARRY_SHARE = 0.12  # share of the warm start's examples with a carry: enough to show it, too few to learn it


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


def pairs_by_level() -> tuple[list[tuple[int, int]], ...]:
    """Split the pairs of two-digit numbers into levels. No level has a held-out pair, in either order.

    The easy levels include carries, because a policy unlearns a carry that it never sees.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    carry = [(a, b) for a, b in pairs if a % 10 + b % 10 >= 10]
    random.Random(PAIRS_SEED).shuffle(carry)
    held_out = {frozenset(pair) for pair in carry[:HELD_OUT]}  # in either order: 38+47 reveals 47+38
    small, larger, hardest = (
        [pair for pair in chosen if frozenset(pair) not in held_out]
        for chosen in ([p for p in pairs if max(p) < 40], [p for p in pairs if max(p) < 70], carry)
    )
    return small, larger, hardest, carry[:HELD_OUT]


def to_row(a: int, b: int) -> dict[str, str]:
    """Make the row of a sum."""
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def written(a: int, b: int) -> str:
    """Write a sum in the form of the warm start: units, tens with the carry, result."""
    units = a % 10 + b % 10
    carry = "+1" if units >= 10 else ""
    return f"{a % 10}+{b % 10}={units} {a // 10}+{b // 10}{carry}={(a + b) // 10} {a + b}"


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    """Train on the curriculum over the three levels, and test on the held-out pairs."""
    refuse_data("arithmetic", config)
    *levels, held_out = pairs_by_level()

    def train():
        sources = [shuffled([to_row(*pair) for pair in level], config) for level in levels]
        thresholds, names = (0.5, 0.5, None), ("below 40", "below 70", "any, with a carry")
        return Curriculum([Level(*level) for level in zip(names, sources, thresholds, strict=True)])

    rewards, test = [correctness, format_reward], [to_row(*pair) for pair in held_out]
    return Task(train, lambda: test, rewards, lambda: examples(config.seed), steps_reward)


def examples(seed: int) -> list[dict[str, str]]:
    """Draw written sums that show the form, rarely with a carry, and never a held-out pair."""
    rng = random.Random(seed)
    *_, carry, _ = pairs_by_level()
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

    *_, carry, _ = pairs_by_level()
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
