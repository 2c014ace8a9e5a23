"""The output of a command: every text can be printed, and a reader that leaves, as `head -1` does, ends it quietly."""

import os
import re
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

# What a terminal obeys instead of showing it: C0 (without tab and newline), DEL, C1, and the directions of Unicode,
# which show text in another order than it has. A surrogate alone cannot be written at all.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LEFT = 128 + signal.SIGPIPE  # the exit code that shells report of a command whose reader has left


def prepare_streams() -> None:
    """Let stdout and stderr print every text, and each line at once, so that a pipe shows a line when it is written.

    Where the terminal's encoding has no such character (PYTHONIOENCODING=ascii), its escape is printed. A stream that
    the process was started without (`>&-`) is the null device from now on.
    """
    null = Path(os.devnull)
    sys.stdout, sys.stderr = (null.open("w") if stream is None else stream for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's stream has no such method, and needs none
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


def escape_controls(text: str) -> str:
    r"""Spell the characters that a terminal would obey as escapes, and keep tabs and newlines.

    Example:
        >>> print(escape_controls("a" + chr(27) + "[2J"))
        a\\x1b[2J
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def reader_left() -> bool:
    """Tell whether the reader of stdout or stderr has left; what is printed afterwards goes to the null device."""
    gone = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
    for stream in gone:
        _drop(stream)
    return bool(gone)


def _has_no_reader(stream):
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # without events of its own, it reports errors and hang-ups alone
        return bool(poll.poll(0))
    except OSError:  # a stream in memory has no number
        return False


def _drop(stream):
    """Lead a stream whose reader has left to the null device, so that no later write fails."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _nothing():
    """Do nothing."""


class Guarded:
    """A text stream that reports once that its reader has left, and drops what is written afterwards."""

    def __init__(self, stream: TextIO, left: Callable[[], None]) -> None:
        self._stream, self._left = stream, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._report()
            return len(text)

    def flush(self) -> None:
        """Write what is still in the buffer."""
        try:
            getattr(self._stream, "flush", _nothing)()  # print does without this method, and so does tqdm
        except BrokenPipeError:
            self._report()

    def _report(self):
        _drop(self._stream)
        self._left()
