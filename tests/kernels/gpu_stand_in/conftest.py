"""Installs the stand-in driver for the capability in FASTGRPO_STAND_IN, before a test file imports a kernel."""

import os

import pytest

CAPABILITY = os.environ.get("FASTGRPO_STAND_IN")
if CAPABILITY is not None:
    from stand_in import StandIn

    driver = StandIn(int(CAPABILITY))
    driver.install()


@pytest.fixture
def launches():
    if CAPABILITY is None:
        pytest.skip("needs FASTGRPO_STAND_IN, such as 90")
    driver.launches.clear()
    return driver.launches
