"""The tasks of the race: model, prompts, reward, and the settings that all contestants share."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.models import unpack
from fastgrpo import GRPOConfig
from fastgrpo.rewards.gsm8k import correctness, digits_reward, format_reward, length_reward
from fastgrpo.tasks import arithmetic, gsm8k, make_policy

SMOLLM2 = os.environ.get("FASTGRPO_SMOLLM2", "models/smollm2-135m")
# Stated, because the defaults of the trainers differ.
COMMON = {
    "loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "temperature": 1.0, "num_iterations": 1,
    "weight_decay": 0.0, "max_grad_norm": 1.0, "lr_scheduler_type": "cosine", "num_generations": 8,
}  # fmt: skip


class RaceTask(NamedTuple):
    """A task of the race.

    Attributes:
        make_model: Saves the model of a seed with its tokenizer to a folder.
        rows: Returns the training rows of a seed, and the held-out rows.
        rewards: The reward functions; a completion is right if the first one gives 1.
        prompts: Prompts of a step.
        updates: Updates per step, each on a part of its groups.
        settings: Settings in the names that the trainers share.
        steps: Steps of a run.
        every: Steps between two measurements of the accuracy.
        target: The accuracy to reach.
        limit: Seconds of training after which a run ends.
    """

    make_model: Callable[[Path, int], None]
    rows: Callable[[int], tuple[list[dict[str, Any]], list[dict[str, Any]]]]
    rewards: list[Callable[..., list[float]]]
    prompts: int
    updates: int
    settings: dict[str, Any]
    steps: int
    every: int
    target: float
    limit: float


def warm_sums(folder: Path, seed: int, module: Any = arithmetic) -> None:
    """Make the model of the built-in example, which has learned the form of written sums."""
    make_policy(module, folder, GRPOConfig(task="arithmetic", seed=seed, dtype="float32"), lambda *step: None)


def carries(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the sums with a carry, shuffled, and the held-out ones."""
    train, held_out = arithmetic.carry_pairs()
    random.Random(seed).shuffle(train)
    return [arithmetic.to_row(*pair) for pair in train], [arithmetic.to_row(*pair) for pair in held_out]


def smollm2(folder: Path, seed: int) -> None:
    """Save SmolLM2-135M-Instruct."""
    unpack(SMOLLM2, folder)


def questions(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return sums in GSM8K's template, shuffled, and the first 100 held-out ones."""
    train, held_out = ([gsm8k.to_row(row, None, True) for row in part] for part in gsm8k.sums())
    random.Random(seed).shuffle(train)
    return train, held_out[:100]


TASKS = {
    "embedded": RaceTask(
        warm_sums, carries, [arithmetic.correctness], prompts=32, updates=2, steps=300, every=20, target=0.95,
        limit=200,
        settings=COMMON | {"learning_rate": 3e-4, "beta": 0.005, "max_completion_length": 28, "warmup_steps": 40,
                           "max_grad_norm": 2.0},
    ),
    "smollm2": RaceTask(
        smollm2, questions, [correctness, format_reward, length_reward, digits_reward], prompts=4, updates=1, steps=120,
        every=20, target=0.6, limit=3000,
        settings=COMMON | {"learning_rate": 1.5e-5, "beta": 0.06, "max_completion_length": 40, "warmup_steps": 5,
                           "scale_rewards": "none"},
    ),
}  # fmt: skip
