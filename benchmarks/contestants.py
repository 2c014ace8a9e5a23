"""Contestants of a benchmark in processes of their own, so that no one's patches reach another, timed in turns.

Liger, for one, replaces layers of transformers for a whole process. A contestant is made in its process by a function
of a benchmark, which returns an `Entry`: some variants of the same work, and what else the benchmark wants to know. The
parent asks for one call at a time, and so the contestants wait for one another. Each is started when the one before it
has been made: what ours measures and reserves while it is made, it does alone on the device.

    python -m benchmarks.contestants MODULE:FUNCTION DEVICE OPTIONS

is such a process. It reads requests, one JSON object a line, and answers each with another one.
"""

import contextlib
import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare import KERNELS_ONLY, in_turns, instruments

ROOT = Path(__file__).parent.parent
MINE = "fastgrpo"  # how the names of our own variants begin: these may not fail
LONGEST = 300  # characters of a reason


@dataclass(frozen=True)
class Entry:
    """What a contestant takes part with.

    Attributes:
        calls: Its variants by name. What one returns is handed to the parent where it is a dict.
        missing: The reason for each variant that does not run here.
        about: What the benchmark wants to know of it, as JSON has it.
    """

    calls: dict[str, Callable[[], Any]]
    missing: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


class Failed(RuntimeError):
    """A contestant raised, or its process ended; the text says which in a line."""


class Contestant:
    """A process with an `Entry`, which `entry` starts.

    Args:
        name: What its variants are called where none of them can be made.
        function: What makes the entry, as module:function.
        device: Where its calls run, "cpu" or "cuda".
        environment: What its process has in its environment beside what this one has.
        options: Arguments of the function, as JSON has them.
    """

    def __init__(
        self, name: str, function: str, device: str, environment: Mapping[str, str] | None = None, **options: Any
    ):
        self.name, self.values, self.process, self.made = name, {}, None, None
        self.environment, self.resident = {**os.environ, **KERNELS_ONLY, **(environment or {})}, 0
        self.command = [sys.executable, "-m", "benchmarks.contestants", function, device, json.dumps(options)]

    def entry(self) -> dict[str, Any]:
        """Start it, wait until it is made, and return the names of its calls, what is missing, and what it is about.

        Raises:
            Failed: It could not be made.
        """
        if self.process is None:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=self.environment
            )  # fmt: skip
        self.made = self.made or self._answer()
        return self.made

    def peak(self, name: str) -> int:
        """Call a variant for the first time, and return its peak memory in bytes.

        Args:
            name: The variant.

        Raises:
            Failed: The call failed.
        """
        return self._ask(name, "peak")

    def seconds(self, name: str) -> float:
        """Call a variant, and return its time in seconds.

        Args:
            name: The variant.

        Raises:
            Failed: The call failed.
        """
        return self._ask(name, "seconds")

    def close(self) -> None:
        """End the process, where it was started."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # of a request that it never read
            self.process.stdin.close()
        self.process.stdout.close()

    def _ask(self, name, what):
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the answer tells
            self.process.stdin.write(json.dumps({"name": name, "what": what}) + "\n")
            self.process.stdin.flush()
        answer = self._answer()
        if answer["value"] is not None:
            self.values.setdefault(name, []).append(answer["value"])
        self.resident = answer["resident"]
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
    """What came of a contest.

    Attributes:
        results: What `compare` returns, for each variant that ran.
        missing: The reason for each variant that did not.
        about: What each contestant said of itself, by its name.
        values: What each variant returned at its calls, where these are dicts.
        again: A function that calls one of our variants once more.
    """

    results: dict[str, dict[str, float]]
    missing: dict[str, str]
    about: dict[str, dict[str, Any]]
    values: dict[str, list[dict[str, Any]]]
    again: Callable[[str], float]


@contextlib.contextmanager
def taking_part(contestants: list[Contestant]) -> Iterator[list[Contestant]]:
    """End the processes of contestants when the block ends.

    Args:
        contestants: The contestants.

    Yields:
        The contestants.
    """
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
    """Time the variants of all contestants in turns, as `compare` does.

    Args:
        contestants: Those that take part, within `taking_part`.
        rounds: As in `compare`.
        missing: The reason for each variant that does not take part at all.
        seconds: As in `compare`.
        whole: Whether the peak memory of a variant is the most that its process ever had resident, with the model and
            all that training keeps, instead of what torch allocates in a call.

    Raises:
        Failed: One of ours failed; another one's failure makes it missing.
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
    for contestant in contestants if whole else ():
        for name in results.keys() & (contestant.made or {}).get("calls", ()):
            results[name]["peak_bytes"] = contestant.resident
    values = {name: found for one in contestants for name, found in one.values.items() if name in results}
    return Contest(results, missing, about, values, lambda name: clocks[name]())


def _timed(name, clock, missing):
    """Return the seconds of a call, or None where it failed and is no call of ours."""
    try:
        return clock()
    except Failed as error:
        _tolerate(name, error, missing)
        return None


def _tolerate(name, error, missing):
    """Note why a peer is missing; a failure of ours is one of the benchmark."""
    if name.startswith(MINE) or f"/{MINE}" in name:
        raise error
    missing[name] = f"failed: {error}"


def _line_of(error: Exception) -> str:
    """Return an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]


def serve(function: str, device: str, options: dict[str, Any]) -> None:
    """Make an entry and answer requests until there are no more.

    Args:
        function: What makes the entry, as module:function.
        device: Where its calls run.
        options: Arguments of the function.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content, default=str) + "\n")
        answers.flush()

    try:
        module, _, attribute = function.partition(":")
        entry = getattr(importlib.import_module(module), attribute)(**options)
    except Exception as error:
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
            answer(error=_line_of(error))
            continue
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts kilobytes
        answer(measured=measured, value=value if isinstance(value, dict) else None, resident=resident)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
