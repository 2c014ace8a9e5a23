"""Reward functions: find, call and check them; and the functions of the tasks.

`find_reward` finds one by name: a folder or ORG/MODEL is a reward model, with prm: before it a process reward model.
sandbox: runs programs, http://HOST:PORT/PATH is a server, and module:function is a function.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastgrpo.rewards.guard import Failure, attempt

__all__ = ["find_reward"]
PRM = "prm:"  # prefix of the folder or hub id of a process reward model


def find_reward(
    spec: str,
    known: Sequence[Callable] = (),
    trust_remote_code: bool = False,
    prm: Mapping[str, Any] | None = None,
    template: Mapping[str, Any] | None = None,
) -> Callable:
    """Find a reward function by its name.

    Args:
        spec: The name of one of `known`, "module:function", the folder or hub id (ORG/MODEL) of a reward model, "prm:"
            before it for a process reward model, the URL of a server (http://HOST:PORT/PATH), "sandbox:python" or
            "sandbox:python-all".
        known: The task's own functions.
        trust_remote_code: Run Python code that comes with a reward model.
        prm: Further arguments of `ProcessRewardModel`.
        template: Arguments of a reward model's chat template.

    Returns:
        The function.

    Raises:
        ValueError: The name, module or function does not exist, or this machine cannot run the sandbox.
    """
    by_name = {function.__name__: function for function in known}
    if spec in by_name:
        return by_name[spec]
    if spec.startswith(("http://", "https://")):
        from fastgrpo.rewards.http import HttpScorer

        return HttpScorer(spec)
    if spec.startswith("sandbox:"):
        from fastgrpo.rewards.sandbox import make_sandbox

        return make_sandbox(spec)
    if spec.startswith(PRM) or names_model(spec):
        return _load_model(spec, {"trust_remote_code": trust_remote_code, "template": template}, prm)
    if ":" not in spec:
        raise ValueError(
            f"unknown reward function {spec!r}; the task has {', '.join(by_name) or 'no functions'}; "
            "pass module:function, a reward model (folder or ORG/MODEL), a process reward model (prm:MODEL), a server "
            "(http://HOST:PORT/PATH), or the sandbox for programs (sandbox:python)"
        )
    function = imported(spec, "reward function")
    if not callable(function):
        raise ValueError(f"reward function {spec!r} is a {type(function).__name__}, which cannot be called")
    return function


def imported(spec: str, kind: str) -> Any:
    """Import module:name, an object of the user's own code; `kind` says what it is in error messages."""
    module, separator, name = spec.partition(":")
    if not separator:
        raise ValueError(f"{kind} {spec!r} must be named module:name")
    found = attempt(lambda: getattr(importlib.import_module(module), name))
    if isinstance(found, Failure):
        raise ValueError(
            f"{kind} {spec!r} cannot be imported: {found}; install the module, or put it into the working "
            "directory or on the PYTHONPATH"
        ) from found.error
    return found


def _load_model(name, settings, prm):
    """Load a reward model; a name with the prefix "prm:" is a process reward model."""
    from fastgrpo.rewards.models import ProcessRewardModel, RewardModel

    if name.startswith(PRM):
        return ProcessRewardModel.load(name.removeprefix(PRM), **settings | dict(prm or {}))
    return RewardModel.load(name, **settings)


def find_rewards(
    rewards: Any,
    tokenizers: Any,
    template: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    prm: Mapping[str, Any] | None = None,
) -> list[Callable]:
    """Turn TRL's `reward_funcs` (functions, models and names) into reward functions."""
    from transformers import PreTrainedModel

    from fastgrpo.rewards.models import RewardModel

    rewards = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
    if tokenizers is None:
        tokenizers = [None] * len(rewards)
    tokenizers = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else [tokenizers]
    if len(tokenizers) != len(rewards):
        raise ValueError(
            f"reward_processing_classes has {len(tokenizers)} entries, which must match the {len(rewards)} reward_funcs"
        )

    def find(reward, tokenizer):
        settings = {"tokenizer": tokenizer, "template": template, "trust_remote_code": trust_remote_code}
        if isinstance(reward, str):
            is_model = reward.startswith(PRM) or names_model(reward)
            return _load_model(reward, settings, prm) if is_model else find_reward(reward)
        return RewardModel(reward, **settings) if isinstance(reward, PreTrainedModel) else reward

    return [find(reward, tokenizer) for reward, tokenizer in zip(rewards, tokenizers, strict=True)]


def prm_options(config: Any, rewards: Any) -> dict[str, Any]:
    """Read the settings of process reward models."""
    names = [*(rewards if isinstance(rewards, (list, tuple)) else [rewards]), *config.reward_funcs]
    if config.prm and not any(isinstance(name, str) and name.startswith(PRM) for name in names):
        raise ValueError(
            f"{next(iter(config.prm))} of reward_model_kwargs has an effect only if reward_funcs names a process "
            f"reward model ({PRM}DIR); leave it out, or pass it to the ProcessRewardModel that you make"
        )
    return config.prm


def names_model(name: str) -> bool:
    """Return whether a name is a reward model, not a function."""
    return Path(name).is_dir() or (":" not in name and "/" in name and not name.endswith(".py"))
