"""Checks that fail in every way a kernel can, for the tests of `doctor --check`: a table as fastgrpo/check/cases.py."""

import os
import signal
import time

import torch
from triton.runtime.errors import OutOfResources

from fastgrpo.check.cases import Case
from fastgrpo.check.places import Trial

FAR = 1e-3  # the error of the wrong kernel, where 1e-5 is allowed


def trial(ours):
    return lambda place: None if place.timed else Trial(ours, ours, lambda value: {"value": (abs(value - 1), 1e-5)})


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def want_too_much():
    raise OutOfResources(106_496, 101_376, "shared memory")


CASES = tuple(
    Case(name, trial(ours), torch.float32, ("cpu",))
    for name, ours in {
        "right": lambda: 1.0,
        "wrong": lambda: 1.0 + FAR,
        "crash": crash,
        "too large": want_too_much,
        "hang": lambda: time.sleep(3600),
    }.items()
)
