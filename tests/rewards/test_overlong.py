"""The soft overlong punishment by hand. Beside other rewards, and against TRL's: tests/trainer/test_experience.py."""

import pytest

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.rewards.overlong import make_soft_overlong_punishment, shaping


def punished(function, *lengths):
    return function(prompts=[], completions=[], completion_ids=[[7] * length for length in lengths])


def test_it_falls_from_0_to_minus_1_over_the_last_tokens():
    """DAPO's equation 13 at L_max = 10, L_cache = 4; longer than L_max is no completion, but -1 as well."""
    function = make_soft_overlong_punishment(10, 4)
    assert punished(function, 0, 1, 6, 7, 8, 9, 10, 11) == [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]
    assert function.__name__ == "soft_overlong_punishment"


@pytest.mark.parametrize("cache, rewards", [(1, [0, 0, 0, -1]), (10, [0, -0.1, -0.9, -1])])
def test_the_narrowest_and_the_widest_range(cache, rewards):
    assert punished(make_soft_overlong_punishment(10, cache), 0, 1, 9, 10) == pytest.approx(rewards)


def test_it_is_added_where_the_settings_ask_for_it():
    assert shaping(GRPOConfig()) == []
    (function,) = shaping(GRPOConfig(max_completion_length=10, soft_punish_cache=4))
    assert punished(function, 6, 8, 10) == [0, -0.5, -1]
