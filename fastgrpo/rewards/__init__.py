"""Reward functions: how they are found, called and checked, and the functions that come with tasks."""

import importlib
from typing import Any

_HOME = {"find_reward": "finding"}  # which loads transformers, and answers are read without it
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fastgrpo.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fastgrpo.rewards.{_HOME[name]}"), name)
