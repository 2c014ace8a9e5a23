"""The tasks of the race: model, prompts, reward, and the settings that all contestants share."""

import functools
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from benchmarks.models import unpack
from fastgrpo import GRPOConfig
from fastgrpo.rewards.gsm8k import correctness, digits_reward, format_reward, length_reward
from fastgrpo.tasks import arithmetic, calculator, gsm8k, make_policy, reasoning_gym
from fastgrpo.tools.calls import error_text

SMOLLM2 = os.environ.get("FASTGRPO_SMOLLM2", "models/smollm2-135m")
# Stated, because the defaults of the trainers differ.
COMMON = {
    "loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "temperature": 1.0, "num_iterations": 1,
    "weight_decay": 0.0, "max_grad_norm": 1.0, "lr_scheduler_type": "cosine", "num_generations": 8,
}  # fmt: skip
SUMS = json.dumps({"chain_sum": {"solved": 2, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}})
WRITTEN_CALLS = {  # how TRL and fastgrpo read the calls of the calculator's model, such as calc(12*34)
    "defaults": {"role": "assistant"},
    "start_anchor": "<eos>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?P<name>calc)\(", "close": ")", "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": {"expression": "{content}"}}},
        },
        "content": {"close": "<eos>"},
    },
}  # fmt: skip


class RaceTask(NamedTuple):
    """A task of the race."""

    title: str  # model and prompts, for pictures
    make_model: Callable[[Path, int], None]  # saves the model of a seed with its tokenizer to a folder
    rows: Callable[[int], tuple[list[dict[str, Any]], list[dict[str, Any]]]]  # training rows of a seed, held-out rows
    rewards: list[Callable[..., list[float]]]  # a completion is right if the first one gives 1
    prompts: int  # of a step
    updates: int  # per step, each on a part of its groups
    settings: dict[str, Any]  # in the names that the trainers share
    steps: int  # of a run
    every: int  # steps between two measurements of the accuracy
    target: float  # the accuracy to reach
    limit: float  # seconds of training after which a run ends
    trl_batch: int | None = None  # TRL's per_device_train_batch_size; None: all completions of an update
    tools: Sequence[Callable[..., str]] = ()  # functions that the model may call
    ends: bool = False  # whether a run ends when the target is measured
    seeds: int = 3  # runs of each contestant


def warm_start(task: ModuleType, folder: Path, seed: int) -> None:
    """Make the model of a built-in task, which has learned from the examples of its warm start."""
    make_policy(task, folder, GRPOConfig(seed=seed, dtype="float32"), lambda *step: None)


def calling_model(folder: Path, seed: int) -> None:
    """Make the model of the calculator, with the format of its calls in the tokenizer."""
    warm_start(calculator, folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = WRITTEN_CALLS
    tokenizer.save_pretrained(folder)


@functools.wraps(calculator.calc)
def calc(expression: str) -> str:
    try:
        return calculator.calc(expression)
    except ValueError as error:  # TRL would word it differently
        return error_text(error)


def problems(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the word problems of the calculator, shuffled, and the first 200 held-out ones."""
    task = calculator.build(GRPOConfig(seed=seed), None)
    return task.train().take(calculator.PROBLEMS), task.test()[:200]


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


@functools.wraps(length_reward)
def overlong(*args: Any, **columns: Any) -> list[float]:
    limit = SimpleNamespace(max_completion_length=TASKS["smollm2"].settings["max_completion_length"])
    return length_reward(*args, **columns | {"trainer_state": limit})  # TRL's state has no limit


def gym_sums(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return problems of reasoning-gym's chain_sum with two numbers below 10, and the first 100 held-out ones."""
    given = {"task": "reasoning_gym", "reasoning_gym_tasks": SUMS, "system_prompt": "Answer in <answer></answer>."}
    config = GRPOConfig(**given, seed=seed)
    task = reasoning_gym.build(config, SimpleNamespace(chat_template=True))
    return task.train().take(TASKS["gym"].prompts * TASKS["gym"].steps), task.test()[:100]


TASKS = {
    "embedded": RaceTask(
        "0.2M parameters, sums with a carry", functools.partial(warm_start, arithmetic), carries,
        [arithmetic.correctness], prompts=32, updates=2, steps=300, every=20, target=0.95, limit=600,
        settings=COMMON | {"learning_rate": 2e-4, "beta": 0.04, "max_completion_length": 28, "warmup_steps": 40,
                           "max_grad_norm": 2.0},
    ),
    "calculator": RaceTask(
        "0.2M parameters, word problems with a calculator", calling_model, problems, [calculator.correctness],
        prompts=32, updates=1, steps=30, every=2, target=0.9, limit=90, tools=[calc],
        settings=COMMON | {"learning_rate": 4e-4, "beta": 0.0, "max_completion_length": 64, "warmup_steps": 10,
                           "max_tool_calling_iterations": 2},
    ),
    "gym": RaceTask(
        "SmolLM2-135M, chain_sum of reasoning-gym", smollm2, gym_sums,
        [reasoning_gym.ScoreAnswer(SUMS), reasoning_gym.format_reward], prompts=4, updates=1, steps=24, every=4,
        target=0.6, limit=1000, trl_batch=8,
        settings=COMMON | {"learning_rate": 1e-5, "beta": 0.0, "max_completion_length": 12, "warmup_steps": 5,
                           "scale_rewards": "none"},
    ),
    "smollm2": RaceTask(
        "SmolLM2-135M, sums in GSM8K's template", smollm2, questions,
        [correctness, format_reward, overlong, digits_reward], prompts=4, updates=1, steps=120, every=10, target=0.6,
        limit=1500, trl_batch=8, ends=True, seeds=1,
        settings=COMMON | {"learning_rate": 1.5e-5, "beta": 0.06, "max_completion_length": 40, "warmup_steps": 5,
                           "scale_rewards": "none"},
    ),
}  # fmt: skip
