"""Runs every check in a child process, and prints a line per check: python -m fastgrpo.doctor --check.

An illegal memory access makes CUDA unusable in its process. So after a crash, hang or failure, the next check gets a
new child.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pkgutil import resolve_name
from typing import NamedTuple

import torch

from fastgrpo.kernel_checks.cases import modes_here

TABLE = "fastgrpo.kernel_checks.cases:CASES"
HOW = {"gpu": "GPU", "cpu": "CPU, without Triton", "interpreter": "CPU, interpreted"}
COLUMNS = "{:<34} {:<19} {:<6} {}"
HEADER = COLUMNS.format("kernel", "where", "result", "worst error (allowed)")


class Line(NamedTuple):
    """The result of one check: each error with its limit, or the problem in one line."""

    name: str
    mode: str
    errors: dict[str, tuple[float, float]]
    problem: str | None = None

    @property
    def worst(self) -> tuple[str, float, float]:
        """Name, error and limit of the largest error relative to its limit; NaN is beyond any limit."""
        return max(
            ((name, *pair) for name, pair in self.errors.items()),
            key=lambda entry: (not entry[1] <= entry[2], entry[1] / max(entry[2], 1e-300)),
            default=("nothing", 0.0, 0.0),
        )

    @property
    def reason(self) -> str | None:
        """The reason of a failure, or None."""
        name, error, allowed = self.worst
        if self.problem or error <= allowed:
            return self.problem
        return f"the error of {name} is {error:.1e}; at most {allowed:.1e} is allowed"

    def __str__(self) -> str:
        error = "{}: {:.1e} ({:.1e})".format(*self.worst) if self.errors else "-"
        text = COLUMNS.format(self.name, HOW[self.mode], "FAIL" if self.reason else "pass", error)
        return f"{text}\n    {self.problem}" if self.problem else text


def check(table: str, mode: str, seconds: float = 120.0, most: int | None = None) -> Iterator[Line]:
    """Run up to `most` checks of a mode; after a failure, start a new process."""
    # Without self-checks: they would replace a wrong kernel before this comparison.
    environment = os.environ | {"FASTGRPO_SELF_CHECK": "0", "TRITON_INTERPRET": str(int(mode == "interpreter"))}
    environment |= {} if mode == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
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
    """Wait for the next result of the child, or for its end."""
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
    """Describe the failure of a process in one line, from its exit code and stderr; None for success."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not code or not lines:
        return f"exit code {code}" if code else None
    exception = re.compile(r"[\w.]+(Error|Exception|OutOfResources)\b")
    raised = next((line for line in reversed(lines) if exception.match(line)), lines[-1])
    # The text of a compilation error follows the line with its type, after a position.
    return (f"{raised} {lines[-1]}" if raised.endswith(":") else raised)[:200]


def check_all(table: str = TABLE) -> int:
    """Check all kernels of a table on this machine, print a line for each, and return how many fail."""
    print(HEADER, flush=True)
    failed = []
    for line in chain.from_iterable(check(table, mode) for mode in modes_here()):
        print(line, flush=True)
        failed.append(line.reason is not None)
    print(f"{failed.count(False)} of {len(failed)} checks passed")
    return sum(failed)


def main(table: str, mode: str, *names: str) -> None:
    """Run checks in this process, and print the errors of each as a line of JSON. An exception ends it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    cases = {case.name: case for case in resolve_name(table)}
    for name in names:
        trial = cases[name].trial(mode)
        print(json.dumps(trial.judge(trial.ours())), file=answers, flush=True)
        del trial
        torch.cuda.empty_cache()  # the next check may need all memory


if __name__ == "__main__":
    main(*sys.argv[1:])
