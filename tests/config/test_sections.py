"""Ranges that the sections of settings share."""

import pytest

from fastgrpo.config.sections import TEMPERATURE


@pytest.mark.parametrize("value", [0, 0.0, 1e-30, 1, 1e30])
def test_a_temperature_is_0_or_warm_enough(value):
    TEMPERATURE.check("temperature", value)


@pytest.mark.parametrize("value", [1e-40, 9e-31, -1, float("nan"), float("inf")])
def test_a_temperature_at_which_logits_overflow_is_refused(value):
    with pytest.raises(ValueError, match=r"temperature must be (0 or at least 1e-30|finite), got"):
        TEMPERATURE.check("temperature", value)
