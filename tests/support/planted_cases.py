"""Checks that fail in every way a kernel can, for the tests of `doctor --check`: a table as kernel_checks/cases.py."""

import os
import signal

from triton.runtime.errors import OutOfResources

from fastgrpo.kernel_checks.cases import Case, Trial


def noisy():
    """Prints as NCCL does with NCCL_DEBUG=INFO, past Python's own output too."""
    os.write(1, b"NCCL INFO ring\n")
    print("{", flush=True)
    return 1.0


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def want_too_much():
    raise OutOfResources(106_496, 101_376, "shared memory")


def trial(ours):
    return lambda mode, dtype: Trial(ours, lambda value: {"value": (abs(value - 1), 1e-5)})


KERNELS = {"right": noisy, "wrong": lambda: 1.001, "crash": crash, "too large": want_too_much}
CASES = tuple(Case(name, trial(ours), ("cpu",)) for name, ours in KERNELS.items())
