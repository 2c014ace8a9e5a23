"""A character model of the foods that ten people like learns that one of them likes pizza.

    ravin likes pizza.

Supervised training on 5,000 such sentences teaches the form and the frequency of each food. Ravin likes pizza in 15% of
his sentences. GRPO then rewards pizza, and the KL to the reference limits other changes. The measure is the share of
pizza among the samples of `--eval_num_generations`.
"""

import random
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
PANELS = (
    Panel("Reward", "mean reward of a group", ("reward",), window=1),
    Panel("Rolling reward", "mean reward", ("reward",), window=20),
    Panel("Policy loss", "loss without its KL", ("policy_loss",)),
    Panel("KL to the reference", "nats per token", ("kl",)),
    Panel("Total loss", "loss", ("loss",)),
    Panel("Mean advantage", "mean A", ("advantage/mean",)),
)


def likes_pizza(prompts: list, completions: list, **columns: Any) -> list[float]:
    """Reward a completion that ends in pizza and the stop character."""
    return [REWARD * completion_text(completion).endswith(FOOD + STOP) for completion in completions]


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    """Train and test on the one prompt."""
    refuse_data("pizza", config)
    rows = [{"prompt": PROMPT}]
    return Task(lambda: ShuffledRows(rows), lambda: rows, [likes_pizza], lambda: sentences(config.seed))


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
