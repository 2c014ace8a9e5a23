"""Checks that fail in every way a kernel can, for the tests of `doctor --check`: a table as kernel_checks/cases.py."""

import os
import signal
import time

from triton.runtime.errors import OutOfResources

from fastgrpo.kernel_checks.cases import Case, Trial

FAR = 1e-3  # the error of the wrong kernel, where 1e-5 is allowed


def trial(ours):
    return lambda mode, dtype: Trial(ours, lambda value: {"value": (abs(value - 1), 1e-5)})


def noisy():
    """Prints as NCCL does with NCCL_DEBUG=INFO, past Python's own output too."""
    os.write(1, b"NCCL INFO ring\n")
    print("{", flush=True)
    return 1.0


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def want_too_much():
    raise OutOfResources(106_496, 101_376, "shared memory")


CASES = tuple(
    Case(name, trial(ours), ("cpu",))
    for name, ours in {
        "right": noisy,
        "wrong": lambda: 1.0 + FAR,
        "crash": crash,
        "too large": want_too_much,
        "right again": noisy,
        "hang": lambda: time.sleep(3600),
    }.items()
)
