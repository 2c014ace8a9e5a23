"""Built-in tasks: prompts and rewards. A task is a module here with `build(config, tokenizer) -> Task`.

A task may also have `make_policy(run_dir, config, announce) -> path`: a small model of its own, used where no
--model_name_or_path is given. Its `build` then comes first, and gets None for the tokenizer.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastgrpo.data.sources import Curriculum, ShuffledRows


@dataclass(frozen=True)
class Task:
    """train: the source of training rows. test: held-out rows, or None. reward_funcs: the first one is the accuracy: a
    completion counts as right where it gives at least 1."""

    train: ShuffledRows | Curriculum
    test: Sequence[dict] | None
    reward_funcs: list[Callable]


def find_task(name):
    """The module of a task. Raises ValueError for an unknown name."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    tasks = [task for task in names if hasattr(importlib.import_module(f"{__name__}.{task}"), "build")]
    if name not in tasks:
        raise ValueError(f"task must be one of {', '.join(tasks)}, got {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
