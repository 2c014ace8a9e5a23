r"""Compare symbolic answers by math-verify, with a limit on CPU time.

SymPy may take hours, or gigabytes, for a text such as 9^{9^{9^9}}. So another process compares, with `CPU_SECONDS` of
CPU time per comparison. Wall time does not count: a busy machine changes no verdict. The process forks a child that
answers requests. A timer kills a child that exceeds the limit, and the process forks the next one.

Protocol: a request is JSON, [answer, expected]. The reply is "u" (the expected answer cannot be read), or "e" and then
"t" or "f". If the child is killed, "k" takes the place of the message that is missing.
"""

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from functools import lru_cache
from multiprocessing.connection import Connection

CPU_SECONDS = 4.0  # of one comparison; the usual one takes some milliseconds
MAX_LENGTH = 300  # characters; a longer answer is prose
_MEMORY = 4 * 2**30  # bytes of address space
_RUN = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from fastgrpo.rewards.symbolic import _serve; _serve()"
_PRECISION = 100  # digits of precision
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r",? ?(?<![\\A-Za-z])(?:and|or)(?![A-Za-z])|;|\\lor(?![A-Za-z])", ","),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\sqrt *\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\A *=|(?<=\{) +| +(?=\})|(?<=[})]) +m\Z", ""),  # m are metres
        (r"\A([^=]+)= *([A-Za-z])\Z", r"\2=\1"),  # 3 = x
    )
]


@lru_cache(maxsize=4096)
def same_values(answer: str, expected: str) -> bool | None:
    r"""Compare two formulas, equations, intervals or lists by value.

    Returns None if the expected value cannot be read, and False if the answer cannot be read or exceeds the limit.

    Examples:
        >>> same_values(r"\sqrt{8}", r"2\sqrt{2}")
        True
    """
    if len(expected) > MAX_LENGTH:
        return None
    if len(answer) > MAX_LENGTH:
        return False
    answer, expected = _distinct_cases(_plain(answer)), _distinct_cases(_plain(expected))
    with _lock:
        try:
            return _ask(answer, expected)
        except (EOFError, ConnectionError):  # the process was killed from outside
            return _ask(answer, expected)


def _ask(answer, expected):
    try:
        return _checker().ask(answer, expected)
    except BaseException:  # such as KeyboardInterrupt: the next request must not read this reply
        _close()
        raise


def _plain(text):
    r"""Rewrite notation that math-verify does not read. A value with \pm becomes two."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if re.search(r"\\[pm][mp](?![A-Za-z])", text) and not re.search(r"[(\[][^()\[\]]*,", text):
        text = text.replace(r"\{", "").replace(r"\}", "")
        both = [part.replace(r"\pm", a).replace(r"\mp", b) for part in text.split(",") for a, b in ("+-", "-+")]
        text = ",".join(dict.fromkeys(both))
    return text


def _distinct_cases(text):
    """Add an index to capitals that stand beside their small letters: math-verify reads both as one."""
    letters = set(re.sub(r"\\[A-Za-z]+", "", text))
    mixed = {letter for letter in letters if letter.isupper() and letter.lower() in letters}
    return re.sub(r"\\[A-Za-z]+|[A-Z]", lambda match: match[0] + "_{0}" if match[0] in mixed else match[0], text)


class _Checker:
    """The process that compares."""

    def __init__(self):
        here, there = socket.socketpair()
        with there:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _RUN, str(there.fileno()), json.dumps(sys.path)],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.connection = Connection(here.detach())
        if self.connection.recv_bytes() != b"ready":
            raise ValueError(
                "an answer is symbolic, but math-verify, which compares such answers, cannot be imported; "
                "pip install 'fastgrpo[train]'"
            )

    def ask(self, answer, expected):
        self.connection.send_bytes(json.dumps([answer, expected]).encode())
        first = self.connection.recv_bytes()
        return None if first != b"e" else self.connection.recv_bytes() == b"t"


_lock = threading.Lock()
_started = None


def _checker():
    global _started
    if _started is None:
        _started = _Checker()
    return _started


@atexit.register
def _close():
    global _started
    checker, _started = _started, None
    if checker is not None:
        checker.connection.close()
        checker.process.kill()
        checker.process.wait()


def _forget():
    """Start again in a forked process: two processes must not use one socket."""
    global _started, _lock
    _started, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _serve():
    """Fork a child that compares, and another after each kill, until the other process closes the socket."""
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        import math_verify
    except ImportError:
        connection.send_bytes(b"missing")
        return
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    connection.send_bytes(b"ready")
    while True:
        child = os.fork()
        if not child:
            _compare_all(connection, math_verify)
        if os.waitpid(child, 0)[1] == 0:
            return
        with contextlib.suppress(OSError):
            connection.send_bytes(b"k")


def _compare_all(connection, math_verify):
    """Answer requests until the socket is closed, then exit."""
    config = math_verify.LatexExtractionConfig()
    kept = dataclasses.replace(config.normalization_config, units=False)  # else the m of 12 + 3m is a unit
    config = [dataclasses.replace(config, normalization_config=kept)]

    @lru_cache(maxsize=256)
    def parsed(text):
        return math_verify.parse(f"${text}$", config, "no_fallback", parsing_timeout=None)

    with contextlib.suppress(EOFError, OSError):
        while True:
            answer, expected = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
            reference = parsed(expected)
            connection.send_bytes(b"e" if reference else b"u")
            same = reference and math_verify.verify(
                reference, parsed(answer), numeric_precision=_PRECISION, timeout_seconds=None
            )
            signal.setitimer(signal.ITIMER_PROF, 0)
            if reference:
                connection.send_bytes(b"t" if same else b"f")
    os._exit(0)
