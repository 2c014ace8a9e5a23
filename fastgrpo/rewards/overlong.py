"""Soft overlong punishment: a reward for the length of a completion (DAPO, arXiv 2503.14476, equation 13)."""

from collections.abc import Callable

from fastgrpo.config.settings import GRPOConfig


def make_soft_overlong_punishment(max_completion_length: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Make a reward function that punishes completions near the length limit.

    With L the tokens of a completion:

        reward = -min(max(L - (max_completion_length - soft_punish_cache), 0) / soft_punish_cache, 1)

    Short completions get 0, and truncated ones -1.

    Args:
        max_completion_length: Length limit in tokens.
        soft_punish_cache: Tokens before the limit (1 to `max_completion_length`) over which the reward falls from 0 to
            -1.

    Returns:
        A reward function that reads `completion_ids`. It is named soft_overlong_punishment.
    """
    free = max_completion_length - soft_punish_cache

    def soft_overlong_punishment(completion_ids, **_):
        return [-min(max(len(ids) - free, 0) / soft_punish_cache, 1.0) for ids in completion_ids]

    soft_overlong_punishment.pooled = False  # a nested function cannot be sent to a process
    return soft_overlong_punishment


def shaping(config: GRPOConfig) -> list[Callable[..., list[float]]]:
    """Make the reward functions that settings add."""
    if not config.soft_punish_cache:
        return []
    return [make_soft_overlong_punishment(config.max_completion_length, config.soft_punish_cache)]
