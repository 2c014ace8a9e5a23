"""Built-in tasks: prompts and rewards. A task is a module here with `build(config, tokenizer) -> Task`.

A task may also have `make_policy(path, config, announce) -> path`, which makes a small model of its own for runs
without --model_name_or_path. In such a run `build` is called before there is a model, and its tokenizer is None.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from fastgrpo.data import Source


@dataclass(frozen=True)
class Task:
    """The data and the rewards of a task. Data is read only when it is needed: an evaluation reads no training data.

    Attributes:
        train: A function that makes the source of training rows. It reads the settings of training, and raises
            ValueError where there is no data to train on.
        test: A function that reads the held-out rows. It returns None where there are none.
        reward_funcs: The task's reward functions. The first one decides the accuracy: a completion counts as right
            where it gives at least 1.
    """

    train: Callable[[], Source]
    test: Callable[[], Sequence[dict] | None]
    reward_funcs: list[Callable]


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
