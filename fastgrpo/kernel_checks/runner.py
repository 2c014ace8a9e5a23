"""Runs every check in another process, and prints a line for each: python -m fastgrpo.doctor --check.

A bad access ends CUDA for its process. So a process goes on with the next check only where the one before has passed;
one that crashes, hangs, does not compile or is wrong was the last one of its process. On a GPU a failed check is tried
again with the other assembler that Triton brings along, because a wrong one of these is a likely cause: Triton takes
`ptxas` up to compute capability 9.x and `ptxas-blackwell` from 10.0 on.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastgrpo.kernel_checks.cases import Case, modes_here
from fastgrpo.kernel_checks.processes import Server
from fastgrpo.kernel_checks.worker import STEPS, find_cases

TABLE = "fastgrpo.kernel_checks.cases:CASES"
SECONDS = 120.0  # time limit of one step of a check
HOW = {"gpu": "GPU", "cpu": "CPU, without Triton", "interpreter": "CPU, interpreted"}
COLUMNS = "{:<34} {:<19} {:<6} {:<34} {:>9} {:>7} {:>14} {:>8}"
HEADER = COLUMNS.format("kernel", "where", "result", "worst error (allowed)", "ms", "x plain", "rate", "of limit")


class Line(NamedTuple):
    """The outcome of one check.

    Attributes:
        name: The case.
        mode: Where it ran.
        found: What the worker found, or its "problem" in one line.
        note: What a second try with the other assembler showed, or "".
    """

    name: str
    mode: str
    found: dict[str, Any]
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether all errors are within what is allowed."""
        return reason(self.found) is None

    def __str__(self) -> str:
        found, times = self.found, ["-"] * 4
        if "ms" in found:
            plain = found["plain_ms"]
            times[:2] = f"{found['ms']:.3f}", "-" if plain is None else f"{found['ms'] / plain:.2f}"
        if "rate" in found:
            times[2:] = found["rate"], f"{found['of_limit']:.0%}"
        worst = worst_of(found)
        error = "-" if worst is None else "{}: {:.1e} ({:.1e})".format(*worst)
        text = COLUMNS.format(self.name, HOW[self.mode], "pass" if self.passed else "FAIL", error, *times)
        notes = [note for note in (found.get("problem"), self.note) if note]
        return text + ("\n    " + "; ".join(notes) if notes else "")


def worst_of(found: dict[str, Any]) -> tuple[str, float, float] | None:
    """Return the name, the error and the largest allowed one of what is nearest to its limit or farthest beyond it."""
    errors = [(name, *pair) for name, pair in found.get("errors", {}).items()]

    def share(entry: tuple[str, float, float]) -> float:
        _, error, allowed = entry
        of_limit = error / allowed if allowed else math.inf if error else 0.0
        return math.inf if math.isnan(of_limit) else of_limit

    return max(errors, key=share, default=None)


def reason(found: dict[str, Any]) -> str | None:
    """Say in one line why a check failed, or return None where it passed."""
    if "problem" in found:
        return found["problem"]
    beyond = {name: (error, allowed) for name, (error, allowed) in found.get("errors", {}).items()
              if not error <= allowed}  # NaN, on either side, is never within a limit  # fmt: skip
    if not beyond:
        return None
    return "the error of {} is {:.1e}, and {:.1e} is allowed".format(*worst_of({"errors": beyond}))


class Checks:
    """Runs checks of a table, in one process as long as they pass; the next one after a failure has a fresh process."""

    def __init__(self, table: str, mode: str, variables: dict[str, str], seconds: float = SECONDS):
        self.command = [sys.executable, "-m", "fastgrpo.kernel_checks.worker", table, mode]
        self.seconds, self.server = seconds, None
        self.environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        self.environment["FASTGRPO_SELF_CHECK"] = "0"  # a kernel that fails there would not be compared here
        if mode != "gpu":
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        if mode == "interpreter":
            self.environment["TRITON_INTERPRET"] = "1"
        self.environment |= variables

    def run(self, name: str, steps: Iterable[str] = STEPS) -> dict[str, Any]:
        """Run steps of a check, until one fails."""
        found = {}
        for step in steps:
            self.server = self.server or Server(self.command, self.environment)
            found |= self.server.ask(json.dumps({"name": name, "step": step}), self.seconds)
            if reason(found) is not None:
                self.close()
                break
        return found

    def close(self) -> None:
        """End the process."""
        if self.server is not None:
            self.server.close()
        self.server = None


def other_assembler() -> dict[str, str]:
    """Return the variable that makes Triton take the other assembler of its wheel on this GPU."""
    bundled = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    before_blackwell = torch.cuda.get_device_capability() < (10, 0)
    variable, program = (
        ("TRITON_PTXAS_PATH", "ptxas-blackwell") if before_blackwell else ("TRITON_PTXAS_BLACKWELL_PATH", "ptxas")
    )
    path = bundled / program
    return {variable: str(path)} if path.exists() else {}


def check(
    table: str, cases: Sequence[Case], mode: str, other: dict[str, str] | None = None, steps: Sequence[str] = (*STEPS,),
    seconds: float = SECONDS, start: Callable[..., Checks] = Checks,
) -> Iterator[Line]:  # fmt: skip
    """Run the checks of a mode, a failed one a second time with the other assembler."""
    with closing(start(table, mode, {}, seconds)) as checks:
        for case in cases:
            if mode in case.modes:
                line = Line(case.name, mode, checks.run(case.name, steps))
                yield line if line.passed or not other else try_again(table, line, other, seconds, start)


def try_again(
    table: str, line: Line, other: dict[str, str], seconds: float = SECONDS, start: Callable[..., Checks] = Checks
) -> Line:
    """Compare the values of a failed check again, with the other assembler."""
    with closing(start(table, line.mode, other, seconds)) as checks:
        again = reason(checks.run(line.name, ("values",)))
    ((variable, path),) = other.items()
    outcome = "passes" if again is None else f"fails too: {again}"
    return line._replace(note=f"with {variable}={path} it {outcome}")


def check_all(table: str) -> int:
    """Check all kernels of a table on this machine, and print a line for each."""
    modes = modes_here()
    other = other_assembler() if "gpu" in modes else {}
    print(HEADER, flush=True)
    count = failed = 0
    for mode in modes:
        for line in check(table, find_cases(table), mode, other):
            print(line, flush=True)
            count, failed = count + 1, failed + (not line.passed)
    print(f"{count - failed} of {count} checks passed")
    return failed
