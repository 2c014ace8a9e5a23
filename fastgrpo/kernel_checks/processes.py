"""Runs commands with a time limit, and says in one line how one ended if not well."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

REASON_LENGTH = 200
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception|OutOfResources)\b")


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        output: What it wrote to its standard output.
        errors: What it wrote to its standard error.
        problem: One line that says why it did not end well; None where it did.
    """

    output: str
    errors: str
    problem: str | None


class Server:
    """A process that answers each line of its input with a JSON object on a line of its output."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self.errors, self.unread = tempfile.TemporaryFile(), b""  # noqa: SIM115 - `close` closes it
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment, bufsize=0
        )

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """Hand a line to the process and wait for the answer. Lines that are no JSON object are passed over."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is told below
            self.process.stdin.write(line.encode() + b"\n")
        end, output = time.monotonic() + seconds, self.process.stdout
        while (answer := self._answer()) is None:
            left = max(end - time.monotonic(), 0)
            if not select.select([output], [], [], left)[0]:
                return {"problem": _too_long(seconds)}
            more = os.read(output.fileno(), 2**16)
            if not more:
                return {"problem": self._how_it_ended(left, seconds)}
            self.unread += more
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.errors):
            file.close()

    def _answer(self):
        """Return the next object of what was read, or None."""
        while b"\n" in self.unread:
            line, _, self.unread = self.unread.partition(b"\n")
            with contextlib.suppress(ValueError):
                if isinstance(found := json.loads(line), dict):
                    return found
        return None

    def _how_it_ended(self, left, seconds):
        """Say why there is no answer and no more output."""
        try:
            code = self.process.wait(left)
        except subprocess.TimeoutExpired:
            return _too_long(seconds)
        self.errors.seek(0)
        said = _what_was_raised(self.errors.read().decode(errors="replace")) if code > 0 else ""
        return said or ("it ended without a result" if code == 0 else _code(code))


def run_limited(
    command: Sequence[str], seconds: float, environment: dict[str, str], folder: str | None = None
) -> Ended:
    """Run a command in a process group of its own; when its time is over, all processes of the group are killed."""
    # Files and no pipes: a process that the command leaves behind could hold a pipe open for ever.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment, cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
            problem = None if process.returncode == 0 else _code(process.returncode)
        except subprocess.TimeoutExpired:
            problem = _too_long(seconds)
        finally:
            _kill_group(process)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if problem and process.returncode > 0:
        problem = _what_was_raised(texts[1]) or problem
    return Ended(*texts, problem)


def _too_long(seconds: float) -> str:
    """Say that a time limit was reached."""
    return f"not done after {seconds:.0f} s"


def _code(code: int) -> str:
    """Say how a process ended that did not end with 0."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _kill_group(process: subprocess.Popen) -> None:
    """Kill the process and what it started."""
    with contextlib.suppress(ProcessLookupError):  # all of them may have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _what_was_raised(text: str) -> str:
    """Return the line of an error's text that names the exception, as short as a table wants it, or else the last one.

    The text of a compilation error stands below that line, after a position in the source.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    raised = next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])
    return (f"{raised} {lines[-1]}" if raised.endswith(":") else raised)[:REASON_LENGTH]
