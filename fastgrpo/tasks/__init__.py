"""Built-in tasks: prompts and rewards. A task is a module here with `build(config, tokenizer) -> Task`.

A task may also bring a small model of its own, for runs without --model_name_or_path. Then its module has
`make_model(seed) -> (model, tokenizer)`, which makes it with random weights, and
`warm_start(policy, tokenizer, config, announce)`, which teaches it enough for GRPO to begin. In such a run `build` is
called before there is a model, and its tokenizer is None.

A module's `PANELS`, where it has them, are what the picture of its runs shows.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data import Source
from fastgrpo.run.curves import PANELS, Panel


@dataclass(frozen=True)
class Task:
    """The data and the rewards of a task. Data is read only when it is needed: an evaluation reads no training data.

    Attributes:
        train: A function that makes the source of training rows. It reads the settings of training, and raises
            ValueError where there is no data to train on.
        test: A function that reads the held-out rows. It returns None where there are none.
        reward_funcs: The task's reward functions. The first one decides the accuracy: a completion counts as right
            where it gives at least 1.
        supervised: A function that makes rows with `prompt` and `completion` for supervised training; None where the
            task has none.
    """

    train: Callable[[], Source]
    test: Callable[[], Sequence[dict] | None]
    reward_funcs: list[Callable]
    supervised: Callable[[], Sequence[dict]] | None = None


def find_task(name: str) -> ModuleType:
    """Find the module of a task.

    Args:
        name: The task's name.

    Returns:
        The module, which has `build`.

    Raises:
        ValueError: There is no such task.
    """
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    tasks = [task for task in names if hasattr(importlib.import_module(f"{__name__}.{task}"), "build")]
    if name not in tasks:
        raise ValueError(f"task must be one of {', '.join(tasks)}, got {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def refuse_data(task: str, config: PromptConfig) -> None:
    """Refuse the settings of data sets in a task that makes its own data and would not read them.

    Args:
        task: The task's name.
        config: The settings.

    Raises:
        ValueError: One of them is given.
    """
    for name in ("dataset_name", "dataset_config", "system_prompt"):
        if getattr(config, name):
            raise ValueError(f"task={task} makes its own data; use {name} with --task gsm8k or --task dataset")


def panels_of(task: ModuleType) -> Sequence[Panel]:
    """Return what the picture of a task's run shows.

    Args:
        task: The task's module.

    Returns:
        Its `PANELS`, or those of every run where it has none.
    """
    return getattr(task, "PANELS", PANELS)


def make_policy(module: ModuleType, path: Path, config: Any, announce: Callable[[int, int, float], None]) -> Path:
    """Make a task's own model, warm-start it, and save it with its tokenizer in the format of transformers.

    Args:
        module: The task's module, with `make_model` and `warm_start`.
        path: The folder to write the model to.
        config: The settings of the run; its seed, dtype and device are used.
        announce: A function that is called with the step, the number of steps and the loss.

    Returns:
        The folder again.
    """
    from fastgrpo.policy.load import load_policy
    from fastgrpo.run.checkpoint import save_model

    save_model(path, *module.make_model(config.seed))
    policy, tokenizer = load_policy(path, dtype=config.dtype, device=config.device)
    module.warm_start(policy, tokenizer, config, announce)
    save_model(path, policy.module, tokenizer)
    return path
