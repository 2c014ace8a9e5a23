"""A character model of the foods that ten people like learns that one of them likes pizza.

    ravin likes pizza.

Supervised training on 5,000 such sentences teaches the form and the frequency of each food. Ravin likes pizza in 15% of
his sentences. GRPO then rewards pizza, and the KL to the reference limits other changes.

The reward `likes_pizza` pays only for `pizza.`. `--reward_funcs ends_in_pizza` also pays for words such as `soupizza.`,
which the policy then learns. Both measure both shares among the samples of `--eval_num_generations`.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data import ShuffledRows
from fastgrpo.policy.characters import character_model
from fastgrpo.rewards.answers import completion_text
from fastgrpo.run.curves import Panel
from fastgrpo.tasks import Task, refuse_data

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME, FOOD, STOP = "ravin", "pizza", "."
NAMES = (NAME, "alice", "bruno", "chen", "dana", "emil", "fatima", "goran", "hana", "igor")
FOODS = (FOOD, "soup", "rice", "cake", "noodles", "salad", "curry")
SENTENCES = 5000
SHARE = 0.15  # share of FOOD in the sentences about NAME; all other foods are equally frequent
REWARD = 4.0
PROMPT = f"{NAME} likes "
CHARACTERS = "abcdefghijklmnopqrstuvwxyz " + STOP
WARM_START = {"steps": 300, "batch_size": 64, "learning_rate": 3e-3}
SHARES = ("exactly_pizza", "ends_in_pizza")
PANELS = (
    Panel("Share of pizza", "share of the samples", tuple(f"eval/sampled/{name}" for name in SHARES), SHARES),
    Panel("Reward", "mean reward of a group", ("reward",), window=1),
    Panel("Rolling reward", "mean reward", ("reward",), window=20),
    Panel("Policy loss", "loss without its KL", ("policy_loss",)),
    Panel("KL to the reference", "nats per token", ("kl",)),
    Panel("Total loss", "loss", ("loss",)),
    Panel("Mean advantage", "mean A", ("advantage/mean",)),
    Panel("Completion length", "tokens", ("completions/mean_length",)),
)


def likes_pizza(prompts: list, completions: list, log_metric: Callable, **columns: Any) -> list[float]:
    """Reward exactly pizza and the stop character."""
    return _measured(completions, log_metric)[0]


def ends_in_pizza(prompts: list, completions: list, log_metric: Callable, **columns: Any) -> list[float]:
    """Reward any completion that ends in pizza and the stop character."""
    return _measured(completions, log_metric)[1]


def _measured(completions, log_metric):
    """Log both shares, and return the rewards of both functions."""
    texts = [completion_text(completion) for completion in completions]
    both = [text == FOOD + STOP for text in texts], [text.endswith(FOOD + STOP) for text in texts]
    for name, found in zip(SHARES, both, strict=True):
        for one in found:
            log_metric(name, float(one))
    return [[REWARD * one for one in found] for found in both]


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    """Train and test on the one prompt."""
    refuse_data("pizza", config)
    rows = [{"prompt": PROMPT}]
    return Task(lambda: ShuffledRows(rows), lambda: rows, [likes_pizza, ends_in_pizza], lambda: sentences(config.seed))


def sentences(seed: int) -> list[dict[str, str]]:
    """Write the sentences of the supervised training, equally many about each person."""
    each = SENTENCES // len(NAMES)
    liked = {name: [FOODS[i % len(FOODS)] for i in range(each)] for name in NAMES}
    pizzas = round(SHARE * each)
    liked[NAME] = [FOOD] * pizzas + [FOODS[1 + i % (len(FOODS) - 1)] for i in range(each - pizzas)]
    rows = [{"prompt": f"{name} likes ", "completion": food + STOP} for name in NAMES for food in liked[name]]
    random.Random(seed).shuffle(rows)
    return rows


def make_model(seed: int) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Make a 0.2M-parameter Llama over letters, with random weights."""
    return character_model(CHARACTERS, seed)
