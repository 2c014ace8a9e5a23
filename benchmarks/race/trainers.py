"""The trainers of the race, each in a process of its own (benchmarks/contestants.py).

An entry has two calls: "step" trains one step, "save" writes the weights to a file for the measurement of the accuracy.
All start from the same model, draw on the CPU in fp32, and take each step's completions as one batch.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from transformers import PreTrainedModel

from benchmarks import stepwise
from benchmarks.contestants import Entry
from benchmarks.race.tasks import TASKS
from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.integrations.trl import patch

WEIGHTS = "weights.safetensors"
TRL = {  # variant -> settings of TRL besides those of the task
    "TRL": {},
    "TRL, continuous batching": {"use_transformers_continuous_batching": True},
    "TRL, loss of fastgrpo": {},
}
VARIANTS = ("fastgrpo", *TRL)


def calls(variant: str, step: Callable[[], Any], model: PreTrainedModel, folder: str) -> Entry:
    """Return the entry of a trainer, whose calls are the variant's name and "save"."""
    return Entry({variant: step, "save": partial(save_model, model, str(Path(folder) / WEIGHTS))})


def our_entry(variant: str, task: str, path: str, folder: str, seed: int) -> Entry:
    """Create fastgrpo's trainer."""
    race = TASKS[task]
    config = GRPOConfig(
        output_dir=f"{folder}/run", prompts_per_step=race.prompts, max_steps=10_000, device="cpu", dtype="float32",
        gradient_checkpointing=False, seed=seed, **race.settings,
    )  # fmt: skip
    trainer = GRPOTrainer(path, race.rewards, config, race.rows(seed)[0])
    return calls(variant, trainer.step, trainer.model, folder)


def trl_entry(variant: str, task: str, path: str, folder: str, seed: int) -> Entry:
    """Create TRL's trainer."""
    race = TASKS[task]
    count = race.prompts * race.settings["num_generations"]
    step, trainer = stepwise.trl_trainer(
        path, race.rewards, race.rows(seed)[0],
        output_dir=f"{folder}/run", per_device_train_batch_size=count, use_cpu=True, bf16=False,
        gradient_checkpointing=False, seed=seed, model_init_kwargs={"dtype": "float32"}, **race.settings,
        adapt=patch if variant == "TRL, loss of fastgrpo" else None, **TRL[variant],
    )  # fmt: skip
    return calls(variant, step, trainer.model, folder)
