"""Runs every check in a child process, and prints a line for each: python -m fastgrpo.doctor --check.

A bad access ends CUDA for its process. So a child goes on with the next check only where the one before has passed; one
that crashes, hangs, does not compile or is wrong was the last one of its child.
"""

import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import torch

from fastgrpo.kernel_checks.cases import modes_here

TABLE = "fastgrpo.kernel_checks.cases:CASES"
SECONDS = 120.0  # time limit of a check
HOW = {"gpu": "GPU", "cpu": "CPU, without Triton", "interpreter": "CPU, interpreted"}
COLUMNS = "{:<34} {:<19} {:<6} {}"
HEADER = COLUMNS.format("kernel", "where", "result", "worst error (allowed)")
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception|OutOfResources)\b")


class Line(NamedTuple):
    """The outcome of one check: each error with the largest that is allowed, or the problem in one line."""

    name: str
    mode: str
    errors: dict[str, tuple[float, float]]
    problem: str | None = None

    @property
    def worst(self) -> tuple[str, float, float] | None:
        """The name, the error and the largest allowed one of what is farthest beyond its limit or nearest to it."""

        def share(entry: tuple[str, float, float]) -> float:
            _, error, allowed = entry
            of_limit = error / allowed if allowed else math.inf if error else 0.0
            return math.inf if math.isnan(of_limit) else of_limit

        return max(((name, *pair) for name, pair in self.errors.items()), key=share, default=None)

    @property
    def reason(self) -> str | None:
        """Why the check failed; None where it passed."""
        if self.problem or all(error <= allowed for error, allowed in self.errors.values()):  # NaN is never within
            return self.problem
        return "the error of {} is {:.1e}, and {:.1e} is allowed".format(*self.worst)

    def __str__(self) -> str:
        error = "{}: {:.1e} ({:.1e})".format(*self.worst) if self.errors else "-"
        text = COLUMNS.format(self.name, HOW[self.mode], "FAIL" if self.reason else "pass", error)
        return f"{text}\n    {self.problem}" if self.problem else text


def check(table: str, mode: str, seconds: float = SECONDS, most: int | None = None) -> Iterator[Line]:
    """Run the checks of a mode, at most so many; the first one after a failure has a fresh process."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["FASTGRPO_SELF_CHECK"] = "0"  # a kernel that fails there would not be compared here
    environment |= {} if mode == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TRITON_INTERPRET": "1"} if mode == "interpreter" else {}
    names = [case.name for case in resolve_name(table) if mode in case.modes][:most]
    while names:
        command = [sys.executable, "-m", "fastgrpo.kernel_checks.runner", table, mode, *names]
        with (
            tempfile.TemporaryFile("w+") as said,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment) as child,
        ):
            try:
                line = None
                while names and (line is None or line.reason is None):
                    line = _next_line(names.pop(0), mode, child, said, seconds)
                    yield line
            finally:
                child.kill()


def _next_line(name, mode, child, said, seconds):
    """Wait for the child's next answer, or for its end."""
    timer, start = threading.Timer(seconds, child.kill), time.monotonic()
    timer.start()
    try:
        answer = child.stdout.readline()
        if answer:
            return Line(name, mode, json.loads(answer))
        child.wait()
    finally:
        timer.cancel()
    if time.monotonic() - start >= seconds:
        return Line(name, mode, {}, f"not done after {seconds:.0f} s")
    said.seek(0)
    return Line(name, mode, {}, problem(child.returncode, said.read()) or "it ended without a result")


def problem(code: int, said: str) -> str | None:
    """Say in one line why a process did not end well, from its exit code and its stderr; None where it did.

    That is the line that names the exception. The text of a compilation error stands below it, after a position.
    """
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not code or not lines:
        return f"exit code {code}" if code else None
    raised = next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])
    return (f"{raised} {lines[-1]}" if raised.endswith(":") else raised)[:200]


def other_assembler() -> str | None:
    """Return VARIABLE=PATH that makes Triton take the other assembler of its wheel on this GPU.

    Triton takes `ptxas` up to compute capability 9.x and `ptxas-blackwell` from 10.0 on.
    """
    bundled = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    before_blackwell = torch.cuda.get_device_capability() < (10, 0)
    variable, program = (
        ("TRITON_PTXAS_PATH", "ptxas-blackwell") if before_blackwell else ("TRITON_PTXAS_BLACKWELL_PATH", "ptxas")
    )
    return f"{variable}={bundled / program}" if (bundled / program).exists() else None


def check_all(table: str = TABLE) -> int:
    """Check all kernels of a table on this machine, print a line for each, and return how many fail."""
    print(HEADER, flush=True)
    count = failed = 0
    for mode in modes_here():
        for line in check(table, mode):
            print(line, flush=True)
            count, failed = count + 1, failed + (line.reason is not None)
    print(f"{count - failed} of {count} checks passed")
    if failed and "gpu" in modes_here() and (other := other_assembler()):
        print(f"A faulty assembler is a likely cause: see whether the checks pass with {other}")
    return failed


def main(table: str, mode: str, *names: str) -> None:
    """Run checks in this process, and print the errors of each as a line of JSON. An exception ends it."""
    if mode == "interpreter":
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of each exp that overflows on its way to a flag
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    cases = {case.name: case for case in resolve_name(table)}
    for name in names:
        trial = cases[name].trial(mode)
        print(json.dumps(trial.judge(trial.ours())), file=answers, flush=True)
        del trial
        gc.collect()
        torch.cuda.empty_cache()  # the next one may need all of it


if __name__ == "__main__":
    main(*sys.argv[1:])
