"""A pool of processes that judges completions, so that no reward function can hang or end the run.

A call that takes longer than its limit is killed with everything that it started, and a new process takes its place.
Each worker has a pipe of its own: there is no lock that a killed one could hold. One thread of the trainer's process
watches all of them, so jobs go on while the trainer draws other completions.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from fastgrpo.rewards.pool_worker import Given, Raised
from fastgrpo.rewards.portable import start_of

_RUN_WORKER = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from multiprocessing.connection import Connection
from fastgrpo.rewards.pool_worker import run
run(Connection(int(sys.argv.pop())))
"""
# Ends the groups of processes that it was told of when the trainer's process is gone, even by SIGKILL.
_RUN_GUARD = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""
START_LIMIT = 600.0  # seconds that a worker may take to import the functions
GRACE = 5.0  # seconds in which the event loop of a worker may cancel what is over its limit, before it is killed
LOOK = 0.1  # seconds after which the watching thread looks for dead processes whose pipe another process keeps open
DIED = "the process that ran it died"
TRIES = 2  # how many workers may die over one job
STARTS = 5  # how many workers in a row may die while they import the functions


class TimedOut:
    """What stands for the result of a call that took longer than its limit."""


TIMED_OUT = TimedOut()


@dataclass(eq=False)
class _Job:
    """Some calls that one worker makes. `results` has one future a call."""

    number: int
    message: tuple
    limit: float | None
    results: list[Future]
    deaths: int = 0
    done: set[int] = field(default_factory=set)  # the calls whose results are known

    def only(self, call: int) -> "_Job":
        """Make a job of one of the calls."""
        which, together, calls, *rest = self.message
        message = which, together, [calls[call]], *rest
        return _Job(self.number, message, self.limit, [self.results[call]], self.deaths)


@dataclass(eq=False)
class _Worker:
    """One process of the pool."""

    process: subprocess.Popen
    connection: Connection
    deadline: float
    ready: bool = False
    state: int = 0  # the version of the run's state that it has
    job: _Job | None = None


class Pool:
    """Runs functions in processes.

    Processes are started with the first job, and stay until `close`.
    """

    def __init__(self, functions: dict[str, Callable], workers: int):
        self.size, self.names = workers, list(functions)
        self.start = start_of(functions)
        self.lock = threading.Lock()
        self.queue, self.workers, self.thread, self.guard = deque(), [], None, None
        self.state, self.version, self.number = None, 0, 0
        self.broken, self.deaths = None, 0
        self.closing = False

    def tell(self, state: Any) -> None:
        """Give the functions another state of the run."""
        with self.lock:
            self.state, self.version = state, self.version + 1

    def submit(
        self, name: str, calls: Sequence[Given], seed: int, limit: float | None, together: bool = False
    ) -> list[Future]:
        """Have a function called."""
        message = self.names.index(name), together, list(calls), seed, limit
        with self.lock:
            self.number += 1
            job = _Job(self.number, message, limit, [Future() for _ in calls])
            self.queue.append(job)
            self._open()
        self._wake()
        return job.results

    def close(self) -> None:
        """End all processes. What was submitted and is not done is given up. A later `submit` starts new ones."""
        with self.lock:
            thread, self.closing = self.thread, True
        if thread is not None:
            self._wake()
            thread.join()

    def _open(self):
        """Start the thread and the guard, unless they are there."""
        if self.thread is None:
            self.closing, self.broken, self.deaths = False, None, 0
            self.bell, self.ear = socket.socketpair()
            self.ear.setblocking(False)
            self.guard = _start_guard()
            self.thread = threading.Thread(target=self._watch, name="rewards", daemon=True)
            self.thread.start()

    def _wake(self):
        self.bell.send(b".")

    def _watch(self):
        """Hand out jobs and take results until the pool is closed. Runs in a thread of its own."""
        try:
            while not self.closing:
                self._hand_out()
                heard = wait([self.ear, *(worker.connection for worker in self.workers)], self._patience())
                if self.ear in heard:
                    self.ear.recv(4096)
                for worker in list(self.workers):
                    gone = worker.process.poll() is not None  # asked first: what it sent before is still to be read
                    if gone:  # a child that it forked would keep the pipe open
                        self._kill_group(worker)
                    # What looks late may have answered while this thread waited for its turn.
                    if worker.connection in heard or gone or self._is_late(worker):
                        self._hear(worker)
                    if worker in self.workers and (gone or self._is_late(worker)):
                        self._lose(worker, late=not gone)
        except Exception as error:  # such as that no process can be started
            self.broken = RuntimeError(f"the processes that judge completions failed: {type(error).__name__}: {error}")
            self.broken.__cause__ = error
        finally:
            self._end()

    def _end(self):
        for worker in list(self.workers):
            self._kill(worker)
        with contextlib.suppress(OSError):  # it was killed
            self.guard.stdin.close()
        self.guard.wait()
        with self.lock:
            left = [*self.queue, *(worker.job for worker in self.workers if worker.job)]
            self.queue.clear()
            self.workers, self.thread = [], None
            self.bell.close()
            self.ear.close()
        for result in (result for job in left for result in job.results if not result.done()):
            if self.broken is None:
                result.cancel()
            else:
                result.set_exception(self.broken)

    def _patience(self):
        """Return how many seconds nothing has to be looked at, unless a pipe is heard; None for ever."""
        busy = [worker.deadline for worker in self.workers if worker.job or not worker.ready]
        return min([LOOK, *(max(deadline - time.monotonic(), 0.0) for deadline in busy)]) if busy else None

    def _is_late(self, worker):
        return (worker.job is not None or not worker.ready) and time.monotonic() > worker.deadline

    def _hand_out(self):
        """Give jobs to idle workers, and start as many workers as there are jobs for."""
        if self.broken is not None:
            for job in self._taken(len(self.queue)):
                for result in job.results:
                    result.set_exception(self.broken)
        starting = sum(not worker.ready for worker in self.workers)
        for _ in range(min(self.size - len(self.workers), len(self.queue) - starting)):
            self._start_worker()
        idle = [worker for worker in self.workers if worker.ready and worker.job is None]
        for worker, job in zip(idle, self._taken(len(idle)), strict=False):  # there may be fewer jobs
            self._send(worker, job)

    def _taken(self, count):
        """Take at most so many jobs out of the queue."""
        with self.lock:
            return [self.queue.popleft() for _ in range(min(count, len(self.queue)))]

    def _send(self, worker, job):
        """Send a worker its job. Its time begins when it says so."""
        worker.job, worker.deadline = job, time.monotonic() + START_LIMIT
        with self.lock:
            version, state = self.version, self.state
        try:
            if worker.state != version:
                worker.connection.send(("state", state))
                worker.state = version
            worker.connection.send(("job", job.number, *job.message))
        except OSError:  # it died, which the loop sees
            pass
        except Exception as error:  # whatever pickling the columns of a row raises
            self._settle(worker, [Raised(f"{type(error).__name__}: a row cannot be sent to a process: {error}", "")])

    def _start_worker(self):
        here, there = socket.socketpair()
        with there:
            descriptor = there.fileno()
            process = subprocess.Popen(
                [sys.executable, "-c", _RUN_WORKER, str(descriptor), json.dumps(sys.path)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a group of its own, which is killed with all that a function starts
                env=os.environ | {"OMP_NUM_THREADS": "1"},  # the workers share the cores
            )
        self._tell_guard("+", process)
        worker = _Worker(process, Connection(here.detach()), time.monotonic() + START_LIMIT)
        self.workers.append(worker)
        with contextlib.suppress(OSError):  # it died, which the loop sees
            worker.connection.send(self.start)

    def _tell_guard(self, sign, process):
        try:
            self.guard.stdin.write(f"{sign}{process.pid}\n")
            self.guard.stdin.flush()
        except OSError:  # it was killed
            self.guard.wait()
            self.guard = _start_guard()
            living = [worker.process.pid for worker in self.workers] + [process.pid] * (sign == "+")
            self.guard.stdin.writelines(f"+{pid}\n" for pid in living)
            self.guard.stdin.flush()

    def _hear(self, worker):
        """Read what a worker has sent."""
        try:
            while worker in self.workers and worker.connection.poll():
                kind, number, call, value = worker.connection.recv()
                if kind == "ready":
                    worker.ready, worker.deadline, self.deaths = True, 0.0, 0
                elif kind == "broken":
                    self._break(f"a process of the pool cannot import the reward functions: {value.told}")
                elif worker.job is None or number != worker.job.number:
                    continue
                elif kind == "began":
                    limit, together = worker.job.limit, worker.job.message[1]
                    spare = GRACE if together else 0.0
                    worker.deadline = float("inf") if limit is None else time.monotonic() + limit + spare
                elif kind == "done":
                    worker.job.done.add(call)
                    worker.job.results[call].set_result(_result(value))
                elif kind == "end":
                    worker.job, worker.deadline = None, 0.0
        except (EOFError, OSError):
            self._lose(worker, late=False)

    def _lose(self, worker, late):
        """End a worker that is late or dead, and settle its job or put it back."""
        self._kill(worker)
        self.workers.remove(worker)
        job, code = worker.job, worker.process.returncode
        if job is None:
            if not worker.ready:
                self.deaths += 1
                if late:
                    self._break(f"a process of the pool took more than {START_LIMIT:g} s to import the functions")
                elif self.deaths >= STARTS:
                    self._break(f"a process of the pool died {_how(code)} while it imported the functions")
            return
        left = [i for i in range(len(job.results)) if i not in job.done]
        if len(left) > 1:  # calls of an async function, of which one is to blame: each is made apart
            with self.lock:
                self.queue.extendleft(job.only(i) for i in reversed(left))
            return
        if late:
            self._settle(worker, [TIMED_OUT] * len(job.results))
            return
        job.deaths += 1
        if job.deaths < TRIES and left:
            with self.lock:
                self.queue.appendleft(job.only(left[0]))
            return
        self._settle(worker, [Raised(f"{DIED} {_how(code)}", "")] * len(job.results))

    def _settle(self, worker, values):
        """Give the calls of a worker's job that are not done their results."""
        for i, result in enumerate(worker.job.results):
            if i not in worker.job.done:
                result.set_result(values[min(i, len(values) - 1)])
        worker.job, worker.deadline = None, 0.0

    def _break(self, reason):
        self.broken = ValueError(f"{reason}; leave --reward_workers and --reward_timeout out to run them in this one")

    def _kill(self, worker):
        """End a process and all that it started, also what it started in a session of its own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(worker.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._kill_group(worker)
        worker.process.wait()
        worker.connection.close()
        self._tell_guard("-", worker.process)

    def _kill_group(self, worker):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)


def _start_guard():
    command = [sys.executable, "-S", "-E", "-c", _RUN_GUARD]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)


def _result(sent):
    """Read what a call gave."""
    try:
        value = pickle.loads(sent)
    except Exception as error:  # a class of the user's own that this process does not have
        return Raised(f"{type(error).__name__}: its result cannot be read in the trainer's process: {error}", "")
    return TIMED_OUT if value is None else value


def _how(code):
    return f"(signal {-code})" if code < 0 else f"(exit code {code})"
