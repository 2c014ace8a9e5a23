"""Finds rewards by what they are given as: a function, a model of transformers, or a name, which one rule reads.

An existing folder and ORG/MODEL are reward models, and module:function is a function.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fastgrpo.rewards.guard import Failure, attempt
from fastgrpo.rewards.reward_model import RewardModel


def find_reward(spec: str, known: Sequence[Callable] = (), trust_remote_code: bool = False) -> Callable:
    """Find a reward function by its name.

    Args:
        spec: The name of one of `known`, "module:function", or the folder or hub id (ORG/MODEL) of a reward model.
        known: The task's own functions.
        trust_remote_code: Whether Python code that comes with a reward model may run.

    Returns:
        The function.

    Raises:
        ValueError: There is no such name, module or function.
    """
    by_name = {function.__name__: function for function in known}
    if spec in by_name:
        return by_name[spec]
    if names_model(spec):
        return RewardModel.load(spec, trust_remote_code=trust_remote_code)
    module, separator, name = spec.partition(":")
    if not separator:
        raise ValueError(
            f"no reward function {spec!r}; the task has {', '.join(by_name) or 'none'}; "
            "a function of your own is named module:function, a reward model by its folder or as ORG/MODEL"
        )
    function = attempt(lambda: getattr(importlib.import_module(module), name))
    if isinstance(function, Failure):
        raise ValueError(
            f"reward function {spec!r} cannot be imported: {function}; the module must be installed, or lie in the "
            "working directory or on the PYTHONPATH"
        ) from function.error
    if not callable(function):
        raise ValueError(f"reward function {spec!r} is a {type(function).__name__}, which cannot be called")
    return function


def found(
    rewards: Any,
    tokenizers: Any,
    template: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> list[Callable]:
    """Turn rewards as TRL takes them into reward functions.

    Args:
        rewards: A function, a model or a name, or a list of them.
        tokenizers: A tokenizer or None for each, or one alone for one reward.
        template: Further arguments of the chat templates.
        trust_remote_code: Whether Python code that comes with a model or a tokenizer may run.

    Returns:
        A function for each.

    Raises:
        ValueError: There are not as many tokenizers as rewards, one cannot be found, or for the reasons of
            `RewardModel`.
    """
    rewards = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
    if tokenizers is None:
        tokenizers = [None] * len(rewards)
    tokenizers = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else [tokenizers]
    if len(tokenizers) != len(rewards):
        raise ValueError(
            f"reward_processing_classes has {len(tokenizers)} entries, which must match the {len(rewards)} reward_funcs"
        )

    def read(reward, tokenizer):
        settings = {"tokenizer": tokenizer, "template": template, "trust_remote_code": trust_remote_code}
        if isinstance(reward, str):
            return RewardModel.load(reward, **settings) if names_model(reward) else find_reward(reward)
        return RewardModel(reward, **settings) if isinstance(reward, PreTrainedModel) else reward

    return [read(reward, tokenizer) for reward, tokenizer in zip(rewards, tokenizers, strict=True)]


def names_model(name: str) -> bool:
    """Tell whether a name is that of a reward model and not of a function.

    Args:
        name: The name.

    Returns:
        True for an existing folder, and for ORG/MODEL. The path of a Python file is neither.
    """
    return Path(name).is_dir() or (":" not in name and "/" in name and not name.endswith(".py"))
