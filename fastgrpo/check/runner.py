"""Runs every check in a process of its own, and prints a line for each: python -m fastgrpo.doctor --check.

A bad access ends CUDA for its process, and so a check may crash, hang, or fail to compile without harm to the others.
On a GPU a failed check is tried again with the other assembler that Triton brings along, because a wrong one of these
is a likely cause: Triton takes `ptxas` up to compute capability 9.x and `ptxas-blackwell` from 10.0 on.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastgrpo.check.cases import Case, modes_here
from fastgrpo.check.processes import run_limited
from fastgrpo.check.worker import find_cases

TABLE = "fastgrpo.check.cases:CASES"
SECONDS = 120.0  # time limit of one check
HOW = {"gpu": "GPU", "cpu": "CPU, without Triton", "interpreter": "CPU, interpreted"}
COLUMNS = "{:<34} {:<19} {:<6} {:<34} {:>9} {:>7} {:>14} {:>8}"
HEADER = COLUMNS.format("kernel", "where", "result", "worst error (allowed)", "ms", "x plain", "rate", "of limit")

Attempt = Callable[[str, str, str, dict[str, str]], dict[str, Any]]  # (table, name, mode, variables) -> what was found


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
    """Return the name, the error and the largest allowed one of what is nearest to its limit or farthest beyond it.

    Args:
        found: What the worker found.

    Returns:
        None where it found no errors.
    """
    errors = [(name, *pair) for name, pair in found.get("errors", {}).items()]

    def share(entry: tuple[str, float, float]) -> float:
        _, error, allowed = entry
        if math.isnan(error):
            return math.inf
        return error / allowed if allowed else math.inf if error else 0.0

    return max(errors, key=share, default=None)


def reason(found: dict[str, Any]) -> str | None:
    """Say in one line why a check failed, or return None where it passed.

    Args:
        found: What the worker found.
    """
    if "problem" in found:
        return found["problem"]
    name, error, allowed = worst_of(found)
    return None if error <= allowed else f"the error of {name} is {error:.1e}, and {allowed:.1e} is allowed"


def attempt(table: str, name: str, mode: str, variables: dict[str, str], seconds: float = SECONDS) -> dict[str, Any]:
    """Run one check in a process of its own.

    Args:
        table: A table of cases, as module:attribute.
        name: The case.
        mode: Where it runs.
        variables: Variables of its environment, beside those of this process.
        seconds: Its time limit.

    Returns:
        What the worker found, or its "problem" in one line.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["FASTGRPO_SELF_CHECK"] = "0"  # a kernel that fails there would not be compared here
    if mode != "gpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if mode == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    ended = run_limited(
        [sys.executable, "-m", "fastgrpo.check.worker", table, name, mode], seconds, {**environment, **variables}
    )
    if ended.problem:
        return {"problem": ended.problem}
    return json.loads(ended.output.splitlines()[-1])


def other_assembler() -> dict[str, str]:
    """Return the variable that makes Triton take the other assembler of its wheel on this GPU.

    Returns:
        Nothing where the wheel has no other one.
    """
    bundled = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    before_blackwell = torch.cuda.get_device_capability() < (10, 0)
    variable, program = (
        ("TRITON_PTXAS_PATH", "ptxas-blackwell") if before_blackwell else ("TRITON_PTXAS_BLACKWELL_PATH", "ptxas")
    )
    path = bundled / program
    return {variable: str(path)} if path.exists() else {}


def check(
    table: str, cases: tuple[Case, ...], mode: str, other: dict[str, str], run: Attempt = attempt
) -> Iterator[Line]:
    """Run the checks of a mode, a failed one a second time with the other assembler.

    Args:
        table: The table that the cases are from, as module:attribute.
        cases: The cases.
        mode: Where they run.
        other: The variable that chooses the other assembler; empty for no second try.
        run: Runs one check, as `attempt` does.

    Yields:
        The outcome of each check, as soon as it is known.
    """
    for case in cases:
        if mode not in case.modes:
            continue
        found, note = run(table, case.name, mode, {}), ""
        if other and reason(found) is not None:
            ((variable, path),) = other.items()
            again = reason(run(table, case.name, mode, other))
            outcome = "passes" if again is None else f"fails too: {again}"
            note = f"with {variable}={path} it {outcome}"
        yield Line(case.name, mode, found, note)


def check_all(table: str) -> int:
    """Check all kernels of a table on this machine, and print a line for each.

    Args:
        table: A table of cases, as module:attribute.

    Returns:
        How many failed.
    """
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
