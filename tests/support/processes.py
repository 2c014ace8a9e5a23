"""Waiting for processes."""

import time


def awaited(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "what is waited for did not come within two minutes"
        time.sleep(0.02)
