"""A pool of processes that call functions, so that no reward function can hang or end the run.

A worker is a thread with its own process. It sends a job, and waits for results, the limit or the end of the process.
Invariants:

- A process that exceeds its limit or dies is killed with all its children.
- The death of a process fails only the call that caused it. Other calls of the job are repeated one by one; a call
  fails at its second death.
- Each call has its own seed, so results depend neither on the number of workers nor on the order of finishing.
- A function that writes to the pipe of its process counts as dead: each message carries a random token.
- No process outlives the trainer, even after SIGKILL: a shell per worker waits for the end of a pipe and kills the
  group.

The process imports only the standard library, so it starts in a tenth of a second.
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import pickle
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from copy import copy
from dataclasses import dataclass, replace
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, NamedTuple

from fastgrpo.rewards.guard import TIMED_OUT, Failure, described, listed, plain

_RUN_WORKER = """import contextlib, json, sys
sys.path[:] = json.loads(sys.argv.pop())
from fastgrpo.rewards import pool
with contextlib.suppress(EOFError, ConnectionError):
    pool._serve(int(sys.argv.pop()))"""
_RUN_GUARD = 'read _; kill -s KILL -- "-$1"'
START_LIMIT = 600.0  # seconds for a worker to import the functions
GRACE = 5.0  # seconds for a worker's event loop to cancel late calls, before it is killed
DIED = "the process that ran it died"
TRIES = 2  # a call fails after so many deaths
TOKEN = 8  # bytes of the token of a process
STARTS = 5  # the pool gives up after so many deaths in a row during the import
_REMEDY = "leave --reward_workers and --reward_timeout out to run them in the trainer's process"


class Given(NamedTuple):
    """One call: its arguments, the names of its logging functions, and its number of completions."""

    arguments: dict[str, Any]
    logs: tuple[str, ...]
    count: int


@dataclass
class _Job:
    """Calls for one process, with a future each. Only an async function has several."""

    function: int
    together: bool
    calls: list[Given]
    seed: int
    limit: float | None
    state: tuple
    results: list[Future]

    def left(self):
        """Return a job for each call without a result."""
        pairs = [(c, r) for c, r in zip(self.calls, self.results, strict=True) if not r.done()]
        return [replace(self, calls=[call], results=[result]) for call, result in pairs]

    def cancel(self):
        for result in self.results:
            result.cancel()

    def settle(self, value):
        for result in self.results:
            if not result.done():
                result.set_exception(value) if isinstance(value, Exception) else result.set_result(value)


class Pool:
    """Calls functions in processes, which start with the first job and end with `close`."""

    def __init__(self, functions: dict[str, Callable], workers: int):
        self.size, self.names, self.start = workers, list(functions), _start_of(functions)
        self.lock, self.workers, self.broken = threading.Lock(), [], None
        self.state = (None,)  # a new tuple after each change

    def tell(self, state: Any) -> None:
        """Set the trainer state that functions get."""
        self.state = (state,)

    def submit(
        self, name: str, calls: Sequence[Given], seed: int, limit: float | None, together: bool = False
    ) -> list[Future]:
        """Submit calls of a function; `together` runs the calls of an async function concurrently."""
        job = _Job(self.names.index(name), together, list(calls), seed, limit, self.state, [Future() for _ in calls])
        with self.lock:
            if not self.workers:
                self.jobs, self.broken = queue.SimpleQueue(), None
                self.ear, self.bell = os.pipe()
            self.jobs.put(job)
            if len(self.workers) < self.size:
                self.workers.append(_Worker(self))
                self.workers[-1].start()
        return job.results

    def close(self) -> None:
        """End all processes, and cancel pending calls. A later `submit` starts new processes."""
        with self.lock:
            workers, self.workers = self.workers, []
            if workers:
                with contextlib.suppress(queue.Empty):  # else a worker would send one to its busy process, and hang
                    while True:
                        self.jobs.get_nowait().cancel()
                os.close(self.bell)  # wakes all waiting workers
                [self.jobs.put(None) for _ in workers]
                [worker.join() for worker in workers]
                os.close(self.ear)


class _Worker(threading.Thread):
    """A thread that owns a process."""

    def __init__(self, pool):
        super().__init__(name="rewards", daemon=True)
        self.pool, self.process = pool, None

    def run(self):
        while (job := self.pool.jobs.get()) is not None:
            try:
                if self.pool.broken is not None:
                    raise self.pool.broken
                self.make(job, TRIES)
            except CancelledError:
                job.cancel()
            except Exception as error:  # for example, no process can be started
                if self.pool.broken is None:
                    text = f"the processes that judge completions failed: {type(error).__name__}: {error}"
                    self.pool.broken = error if isinstance(error, ValueError) else RuntimeError(text)
                job.settle(self.pool.broken)
        self.kill()

    def make(self, job, tries):
        """Run a job. If its process is late or ends, run the remaining calls again."""
        try:
            self.attempt(job)
        except (EOFError, TimeoutError) as end:
            code, late, left = self.kill(), isinstance(end, TimeoutError), job.left()
            if len(left) > 1 or (not late and tries > 1):  # any of several calls may have caused it
                for one in left:
                    self.make(one, TRIES if len(left) > 1 else tries - 1)
            else:
                job.settle(TIMED_OUT if late else Failure(None, f"{DIED} {code}"))

    def attempt(self, job):
        """Send a job to the process, and set its results."""
        if self.process is None or self.process.poll() is not None:
            self.open()
        new = None if job.state is self.state else job.state
        try:
            # Connection.send passes tensors by shared memory, which only processes of multiprocessing can open.
            self.connection.send_bytes(pickle.dumps((new, job.function, job.together, job.calls, job.seed, job.limit)))
        except OSError:
            raise EOFError from None
        except Exception as error:  # pickling the columns of a row may raise anything
            job.settle(Failure(None, f"{type(error).__name__}: a row cannot be sent to a process: {error}"))
            return
        self.state, ends = job.state, time.monotonic() + START_LIMIT
        while True:
            kind, call, value = self.receive(ends)
            if kind == "began":
                ends = None if job.limit is None else time.monotonic() + job.limit + GRACE * job.together
            elif kind == "done":
                try:
                    value = pickle.loads(value)
                except Exception as error:  # a class of the user's own that this process does not have
                    what = "its result cannot be read in the trainer's process"
                    value = Failure(None, f"{type(error).__name__}: {what}: {error}")
                job.results[call].set_result(TIMED_OUT if value is None else value)
            else:
                return

    def receive(self, ends):
        """Wait for a message: 4 bytes with its length, the token, and the pickled value.

        Raise EOFError if the process died or wrote something else, and TimeoutError after `ends`.
        """
        data = self.received
        while data[4 : 4 + TOKEN] == self.token[: max(len(data) - 4, 0)]:
            end = 4 + int.from_bytes(data[:4], "big")
            if len(data) >= max(end, 4 + TOKEN):
                self.received = data[end:]
                return pickle.loads(data[4 + TOKEN : end])
            new, seconds = b"", None if ends is None else max(ends - time.monotonic(), 0.0)
            # The process may be dead while a child that it forked keeps the pipe open.
            ready = wait([self.connection, self.end, self.pool.ear], seconds)
            if self.pool.ear in ready:
                raise CancelledError
            with contextlib.suppress(ConnectionError):
                new = os.read(self.connection.fileno(), 1 << 20) if self.connection in ready else b""
            if not new:
                raise EOFError if ready else TimeoutError
            data += new
        raise EOFError

    def open(self):
        """Start a process, and wait until it has imported the functions."""
        for _ in range(STARTS):
            self.kill()
            self.spawn()
            try:
                self.connection.send((self.token, self.pool.start))
                kind, _, value = self.receive(time.monotonic() + START_LIMIT)
            except (OSError, EOFError):
                code = self.kill()
                continue
            if kind == "broken":
                raise ValueError(f"a process of the pool cannot import the reward functions: {value.told}; {_REMEDY}")
            return
        raise ValueError(
            f"a process of the pool died {code} while it imported the functions, or took too long; {_REMEDY}"
        )

    def spawn(self):
        here, there = socket.socketpair()
        with there:
            process = subprocess.Popen(
                [sys.executable, "-c", _RUN_WORKER, str(there.fileno()), json.dumps(sys.path)],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a group of its own, which is killed with all that a function starts
                env=os.environ | {"OMP_NUM_THREADS": "1"},  # the workers share the cores
            )
        self.end = os.pidfd_open(process.pid)
        guard = ["sh", "-c", _RUN_GUARD, "sh", str(process.pid)]
        self.guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        # Assigned last: if a call above fails, `here` closes, and the process ends by itself.
        self.connection, self.state, self.process = Connection(here.detach()), None, process
        self.token, self.received = os.urandom(TOKEN), bytearray()

    def kill(self):
        """Kill the process and all its children, also in other sessions. Return how it ended."""
        if self.process is None:
            return None
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.guard.kill()  # before `wait` frees the number of the group
        self.guard.wait()
        self.guard.stdin.close()
        code = self.process.wait()
        self.connection.close()
        os.close(self.end)
        self.process = None
        return f"(signal {-code})" if code < 0 else f"(exit code {code})"


def _start_of(functions: Mapping[str, Callable]) -> tuple:
    """Return the first message to a process: command line, main module if functions are in it, and functions."""
    if _starting:
        raise RuntimeError(
            "this process judges completions, and it runs the script again to find the reward function in it; put "
            'the code that creates and starts the trainer under `if __name__ == "__main__":`'
        )
    for name, function in functions.items():
        try:
            pickle.dumps(function)
        except Exception as error:  # PicklingError, AttributeError, TypeError, or what the user's own class raises
            raise ValueError(
                f"reward function {name!r} cannot be sent to another process ({error}); define it by a def at the top "
                "of a module, or leave --reward_workers and --reward_timeout out to run it in the trainer's process"
            ) from error
    pickled, main = pickle.dumps(list(functions.values())), sys.modules["__main__"]
    module, script = getattr(main.__spec__, "name", None), getattr(main, "__file__", None)
    needed = {"init_main_from_name": module} if module else {"init_main_from_path": script and os.path.abspath(script)}
    return list(sys.argv), needed if b"__main__" in pickled and any(needed.values()) else {}, pickled


_starting = False  # whether this process is a worker that imports its functions


def _serve(descriptor):
    """Run jobs until the trainer closes the pipe, which raises. A reply is (kind, call, value)."""
    connection = Connection(descriptor)
    with contextlib.suppress(OSError, AttributeError):  # adopts orphaned grandchildren, to kill them too
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    token, start = connection.recv()

    def reply(*message):
        connection.send_bytes(token + pickle.dumps(message))

    try:
        functions = _load(*start)
    except BaseException as error:  # an import may raise anything
        reply("broken", 0, described(error))
        return
    reply("ready", 0, None)
    folder, state = os.getcwd(), None

    def answer(call, value):
        try:
            sent = pickle.dumps(value)
        except Exception as error:  # PicklingError, TypeError, or what the user's own class raises
            sent = pickle.dumps(Failure(None, f"{type(error).__name__}: its result cannot leave its process: {error}"))
        reply("done", call, sent)

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as loop:
        while True:
            new, which, together, calls, seed, limit = connection.recv()
            state = state if new is None else new[0]
            reply("began", 0, None)
            _seed(seed)
            if together:
                loop.run(_call_all(functions[which], calls, state, limit, answer))
            else:
                answer(0, _call(functions[which], calls[0], state, loop))
            reply("end", 0, None)
            os.chdir(folder)


def _load(arguments, main, functions):
    """Set the command line, and import the main module if needed, and the functions."""
    global _starting
    sys.argv[:], _starting = arguments, True
    spawn.prepare(main)
    loaded, _starting = pickle.loads(functions), False
    return loaded


def _arguments(given, state):
    """Add logging functions and trainer state to the arguments of a call."""
    logged = []

    def logging_by(name):
        return lambda *args, **named: logged.append((name, *pickle.loads(pickle.dumps((args, named)))))

    if state is not None:
        state = SimpleNamespace(**{name: copy(value) for name, value in vars(state).items()})
    return given.arguments | {name: logging_by(name) for name in given.logs} | {"trainer_state": state}, logged


def _call(function, given, state, loop):
    """Call a function, or await its result. Return the result and the calls of logging functions."""
    arguments, logged = _arguments(given, state)
    try:
        result = function(**arguments)
        result = loop.run(_awaited(result)) if inspect.isawaitable(result) else result
        return _listed(result, given.count), logged
    except BaseException as error:
        return described(error)


async def _awaited(result):
    return await result


async def _call_all(function, calls, state, limit, answer):
    """Run the calls of an async function at the same time, each within the limit."""

    async def one(i):
        arguments, logged = _arguments(calls[i], state)
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                result = await function(**arguments)
            answer(i, (_listed(result, calls[i].count), logged))
        except BaseException as error:
            answer(i, None if scope.expired() and isinstance(error, TimeoutError) else described(error))

    await asyncio.gather(*map(one, range(len(calls))))


def _seed(seed):
    """Seed the global random generators of imported libraries."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed % 2**63)


def _listed(result, count):
    """Turn an iterable result into a list, which can be sent."""
    if getattr(result, "ndim", 0) == 1 and hasattr(result, "tolist") and not hasattr(result, "columns"):
        return result.tolist()
    items = listed(result, count)
    return result if items is None else [plain(item) for item in items]
