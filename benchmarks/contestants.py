"""Contestants of a benchmark in separate processes, timed in turns, so that patches of one do not affect another.

Liger, for example, replaces layers of transformers for a whole process. In its process, a function of a benchmark
creates a contestant and returns an `Entry`: some variants of the same work, and further facts. The parent requests one
call at a time, so only one contestant runs. Each is started after the previous one is ready, so that setup, such as
measuring and reserving memory, has the device for itself.

    python -m benchmarks.contestants MODULE:FUNCTION DEVICE OPTIONS

is such a process. It reads requests, one JSON object per line, and answers each with a JSON object.
"""

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.compare import KERNELS_ONLY, L2_BYTES, in_turns, instruments

ROOT = Path(__file__).parent.parent
MINE = "fastgrpo"  # prefix of the names of our own variants, which must not fail
LONGEST = 300  # maximum characters of a reason


@dataclass(frozen=True)
class Entry:
    """The variants of a contestant."""

    calls: dict[str, Callable[[], Any]]  # by name; if one returns a dict, the parent gets it
    missing: dict[str, str] = field(default_factory=dict)  # the reason for each variant that does not run
    about: dict[str, Any] = field(default_factory=dict)  # further facts, JSON-serializable


class Failed(RuntimeError):
    """A contestant raised, or its process ended; the message is one line."""


class Contestant:
    """A process with an `Entry`, started by `entry`."""

    def __init__(
        self,
        name: str,  # to report if no variant can be created
        function: str,  # module:function, which creates the entry
        device: str,  # "cpu" or "cuda"
        environment: Mapping[str, str] | None = None,  # additional variables
        python: str = sys.executable,
        **options: Any,  # arguments of the function, JSON-serializable
    ):
        self.name, self.values, self.process, self.made = name, {}, None, None
        self.peaks = {}  # on a GPU: peak memory in bytes of the last timed call of each variant
        self.environment, self.resident = {**os.environ, **KERNELS_ONLY, **(environment or {})}, 0
        self.command = [python, "-m", "benchmarks.contestants", function, device, json.dumps(options)]

    def entry(self) -> dict[str, Any]:
        """Start the process, wait until it is ready, and return the fields of its entry, with names of calls.

        If the entry cannot be created, `Failed` is raised.
        """
        if self.process is None:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=self.environment
            )  # fmt: skip
        self.made = self.made or self._answer()
        return self.made

    def peak(self, name: str) -> int:
        """Call a variant for the first time, and return its peak memory in bytes. Raises `Failed` if it fails."""
        return self._ask(name, "peak")

    def seconds(self, name: str) -> float:
        """Call a variant, and return its time in seconds. Raises `Failed` if it fails."""
        return self._ask(name, "seconds")

    def close(self) -> None:
        """Kill the process, if it was started."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # from an unread request
            self.process.stdin.close()
        self.process.stdout.close()

    def _ask(self, name, what):
        with contextlib.suppress(BrokenPipeError):  # the process has ended; `_answer` raises
            self.process.stdin.write(json.dumps({"name": name, "what": what}) + "\n")
            self.process.stdin.flush()
        answer = self._answer()
        if answer["value"] is not None:
            self.values.setdefault(name, []).append(answer["value"])
        self.resident = answer["resident"]
        if answer["peak"] is not None:
            self.peaks[name] = answer["peak"]
        return answer["measured"]

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"its process ended with code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer


class Contest(NamedTuple):
    """Results of a contest."""

    results: dict[str, dict[str, float]]  # as from `compare`, for each variant that ran
    missing: dict[str, str]  # the reason for each variant that did not run
    about: dict[str, dict[str, Any]]  # facts about each contestant
    values: dict[str, list[dict[str, Any]]]  # the dicts that each variant returned
    again: Callable[[str], float]  # calls one of our variants once more


@contextlib.contextmanager
def taking_part(contestants: list[Contestant]) -> Iterator[list[Contestant]]:
    """Yield the contestants, and kill their processes when the context ends."""
    try:
        yield contestants
    finally:
        for contestant in contestants:
            contestant.close()


def contest(
    contestants: list[Contestant],
    rounds: int,
    missing: dict[str, str] | None = None,
    seconds: float | None = None,
    whole: bool = False,
) -> Contest:
    """Time the variants of all contestants within `taking_part` in turns, as `compare` does.

    With `whole`, the peak memory is the peak resident memory of the process (on a GPU, the most that torch reserved),
    with the model and all state of training, instead of torch's allocations in a call. If one of our variants fails,
    `Failed` is raised; a peer that fails is recorded as missing.
    """
    missing, about, clocks, peaks = dict(missing or {}), {}, {}, {}
    for contestant in contestants:
        try:
            entry = contestant.entry()
        except Failed as error:
            _tolerate(contestant.name, error, missing)
            continue
        missing |= entry["missing"]
        about[contestant.name] = entry["about"]
        for name in entry["calls"]:
            try:
                first = contestant.seconds if whole else contestant.peak
                peaks[name] = first(name)  # the warm-up
            except Failed as error:
                _tolerate(name, error, missing)
                continue
            clocks[name] = partial(contestant.seconds, name)
    results = in_turns({name: partial(_timed, name, clock, missing) for name, clock in clocks.items()}, peaks, rounds,
                       seconds)  # fmt: skip
    if not whole:  # a first call may allocate state that lives on, such as the moments of an optimizer
        for name, peak in ((name, peak) for one in contestants for name, peak in one.peaks.items() if name in results):
            results[name]["peak_bytes"] = peak
    for contestant in contestants if whole else ():
        for name in results.keys() & (contestant.made or {}).get("calls", ()):
            results[name]["peak_bytes"] = contestant.resident
    values = {name: found for one in contestants for name, found in one.values.items() if name in results}
    return Contest(results, missing, about, values, lambda name: clocks[name]())


def _timed(name, clock, missing):
    """Return the seconds of a call, or None if a peer failed."""
    try:
        return clock()
    except Failed as error:
        _tolerate(name, error, missing)
        return None


def _tolerate(name, error, missing):
    """Record why a peer is missing. Raise if the variant is ours."""
    if name.startswith(MINE) or f"/{MINE}" in name:
        raise error
    missing[name] = f"failed: {error}"


def _line_of(error: Exception) -> str:
    """Return an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]


def serve(function: str, device: str, options: dict[str, Any]) -> None:
    """Create an entry with module:function, and answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content, default=str) + "\n")
        answers.flush()

    try:
        module, _, attribute = function.partition(":")
        entry = getattr(importlib.import_module(module), attribute)(**options)
    except Exception as error:
        traceback.print_exc()
        answer(error=_line_of(error))
        return
    measure = dict(zip(("peak", "seconds"), instruments(device), strict=True))
    answer(calls=list(entry.calls), missing=entry.missing, about=entry.about)
    for line in sys.stdin:
        request, value = json.loads(line), None

        def call(name: str = request["name"]) -> None:
            nonlocal value
            value = entry.calls[name]()

        try:
            measured = measure[request["what"]](call)
        except Exception as error:
            traceback.print_exc()
            answer(error=_line_of(error))
            continue
        # ru_maxrss would be at least the parent's when it started this process.
        told = status.read_text() if (status := Path("/proc/self/status")).exists() else ""
        (resident,) = re.findall(r"VmHWM:\s+(\d+) kB", told) or [0]
        memory = torch.cuda.max_memory_reserved() - L2_BYTES if device == "cuda" else int(resident) * 1024
        peak = getattr(measure[request["what"]], "peak", None)
        answer(measured=measured, value=value if isinstance(value, dict) else None, resident=memory, peak=peak)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
