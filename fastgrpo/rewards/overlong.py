"""Soft overlong punishment: length as a reward (DAPO, arXiv 2503.14476, eq. 13)."""


def make_soft_overlong_punishment(max_completion_length, soft_punish_cache):
    """A reward function of the tokens L of a completion: 0 up to max_completion_length - soft_punish_cache, from there
    linearly down to -1 at max_completion_length, which is the L of a truncated one.

    Args:
        max_completion_length, soft_punish_cache: tokens; the second is positive and no more than the first.
    """
    free = max_completion_length - soft_punish_cache

    def soft_overlong_punishment(completion_ids, **_):
        return [-min(max(len(ids) - free, 0) / soft_punish_cache, 1.0) for ids in completion_ids]

    return soft_overlong_punishment


def shaping(config):
    """The reward functions that a `GRPOConfig` adds to a person's own."""
    if not config.soft_punish_cache:
        return []
    return [make_soft_overlong_punishment(config.max_completion_length, config.soft_punish_cache)]
