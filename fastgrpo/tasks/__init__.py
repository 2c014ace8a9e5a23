"""Built-in tasks: prompts and rewards. A task is a module here with `build(config, tokenizer) -> Task`.

A task may also have `make_policy(run_dir, config, announce) -> path`: a small model of its own, used where no
--model_name_or_path is given. Its `build` then comes first, and gets None for the tokenizer.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from fastgrpo.data import Source


@dataclass(frozen=True)
class Task:
    """What a task brings. Its data is read when it is asked for, so that an evaluation reads no training data.

    Attributes:
        train: Makes the source of training rows. It reads the settings of training, and raises ValueError where there
            is no data to train on.
        test: Reads the held-out rows; None where there are none.
        reward_funcs: The task's reward functions. The first one is the accuracy: a completion counts as right where it
            gives at least 1.
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
