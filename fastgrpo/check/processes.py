"""Runs a command in a process group of its own with a time limit, and says in one line how it ended if not well."""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

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


def run_limited(
    command: Sequence[str], seconds: float, environment: dict[str, str], folder: str | None = None
) -> Ended:
    """Run a command. When its time is over, it and all processes that it started are killed.

    Args:
        command: The program and its arguments.
        seconds: Its time limit.
        environment: All variables of its environment.
        folder: Where it runs; None is here.
    """
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
            problem = f"not done after {seconds:.0f} s"
        finally:
            _kill_group(process)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if problem and process.returncode > 0:
        problem = _what_was_raised(texts[1]) or problem
    return Ended(*texts, problem)


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
