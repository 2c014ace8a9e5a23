"""Reward functions: how they are found, called and checked, and the functions that come with tasks."""

from typing import Any

__all__ = ["find_reward"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fastgrpo.rewards' has no attribute {name!r}")
    from fastgrpo.rewards.finding import find_reward  # which loads transformers, and answers are read without it

    return find_reward
