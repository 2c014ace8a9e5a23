"""Calls tools. Each call gets an answer that the model can read; nothing that a tool does ends the run.

Plain functions run in daemon threads, and all methods of one environment in the same thread: a connection to SQLite,
for example, may only be used in the thread that made it. Async functions run together on one event loop, where they may
share clients. A call that exceeds its time limit is abandoned: its thread goes on by itself, its coroutine is
cancelled.
"""

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fastgrpo.data.prompts import copied

BEAT = 1.0  # seconds; an event loop that runs no task within this time is blocked
PATIENCE = 0.1  # seconds; a tool is quick while all its answers have taken less
OWN = ("reset", "get_reward")  # methods of an environment that are not tools
LONGEST_ANSWER = 32_768  # characters of an answer; the rest is cut off


@dataclass(frozen=True)
class Answer:
    """The answer to a call."""

    content: str  # the text that the model reads; {"error": ...} if the call failed
    failed: bool = False
    timed_out: bool = False  # whether the call failed because it exceeded its time limit
    latency_s: float = 0.0  # seconds from the call to the answer


class _Threads:
    """A pool of daemon threads. It starts another thread if all are busy."""

    def __init__(self):
        self.lock, self.jobs, self.idle = threading.Lock(), queue.SimpleQueue(), 0

    def run(self, job):
        with self.lock:
            self.idle -= 1
            busy = self.idle < 0
            self.idle = max(self.idle, 0)
        self.jobs.put(job)
        if busy:
            threading.Thread(target=self._work, name="fastgrpo-tool", daemon=True).start()

    def _work(self):
        while True:
            self.jobs.get()()
            with self.lock:
                self.idle += 1


class Worker:
    """A daemon thread that runs jobs one after another, until `close`. Later jobs run in other threads."""

    def __init__(self):
        self.lock, self.jobs, self.closed = threading.Lock(), queue.SimpleQueue(), False
        threading.Thread(target=self._work, name="fastgrpo-environment", daemon=True).start()

    def run(self, job: Callable[[], None]) -> None:
        """Run a job after those before it."""
        with self.lock:
            (_THREADS.run if self.closed else self.jobs.put)(job)

    def close(self) -> None:
        """End the thread after its jobs."""
        with self.lock:
            self.closed = True
            self.jobs.put(None)

    def _work(self):
        while (job := self.jobs.get()) is not None:
            job()
            del job  # it refers to the environment


class _Loop:
    """The event loop of async tools, in a thread of its own."""

    def __init__(self):
        self.lock, self.loop = threading.Lock(), None

    def get(self):
        with self.lock:
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(self.loop,), name="fastgrpo-loop", daemon=True).start()
            return self.loop

    def _run(self, loop):
        while True:
            with contextlib.suppress(BaseException):  # a task of a tool raised SystemExit, which ends the loop
                loop.run_forever()

    def renew(self):
        """Replace the loop if a coroutine blocks it, as a call without `await` may."""
        loop = self.loop
        if loop is None:
            return
        beat = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        blocked = not wait([beat], BEAT).done
        with self.lock:
            if blocked and self.loop is loop:
                self.loop = None


_THREADS, _LOOP = _Threads(), _Loop()
renew_loop = _LOOP.renew  # to be called after a time limit was exceeded


def in_thread(function: Callable, *args: Any, worker: Worker | None = None) -> Future:
    """Run a function in the thread of `worker`, or if None in any daemon thread."""
    future = Future()

    def run():
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(*args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    (worker or _THREADS).run(run)
    return future


def on_loop(awaitable: Awaitable) -> Future:
    """Await something on the event loop of async tools."""
    return asyncio.run_coroutine_threadsafe(_awaited(awaitable), _LOOP.get())


async def _awaited(awaitable):
    return await awaitable


def settled(value: Any) -> Any:
    """Return a value, or the result of an awaitable."""
    return on_loop(value).result() if inspect.isawaitable(value) else value


def as_text(result: Any) -> str:
    """Convert the result of a tool or a reset to text, like str(), except for bytes and blocks of text."""
    if isinstance(result, (bytes, bytearray)):
        text = result.decode(errors="replace")
    elif isinstance(result, list) and result and all(map(_is_text_block, result)):
        text = "".join(block["text"] for block in result)
    else:
        text = str(result)
    cut = len(text) - LONGEST_ANSWER
    if cut > 0:
        text = f"{text[:LONGEST_ANSWER]}... ({cut:,} more characters were cut off)"
    return text.encode(errors="replace").decode()  # samples.jsonl cannot encode half a character


def _is_text_block(block):
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def error_text(problem: BaseException | str) -> str:
    """Return the answer to a call that failed."""
    if isinstance(problem, BaseException):
        try:
            told = str(problem)
        except Exception:  # the class of the exception is the user's own, too
            told = ""
        problem = f"{type(problem).__name__}: {told}" if told else type(problem).__name__
    return as_text({"error": problem})


class ToolBox:
    """The tools of a completion, by name.

    transformers makes the schemas of `tools` from their type annotations and Google docstrings. ValueError is raised
    if a tool has no schema, or two have the same name. The public methods of `environment` but `reset` and `get_reward`
    are tools, too; they run in `worker`. `timeout` limits a call, in seconds.
    """

    def __init__(self, tools: Sequence[Callable], timeout: float | None = None, environment: Any = None):
        self.timeout, self.methods, self.worker = timeout, public_methods(environment), None
        every = [*tools, *self.methods.values()]
        self.schemas = [_schema(tool) for tool in every]
        names = [schema["function"]["name"] for schema in self.schemas]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two tools have the name {twice.pop()!r}; rename one of them")
        self.tools = dict(zip(names, every, strict=True))
        functions = [schema["function"] for schema in self.schemas]
        self.required = {function["name"]: {*function["parameters"].get("required", ())} for function in functions}
        self.pace = SimpleNamespace(quick=not any(map(inspect.iscoroutinefunction, every)))

    def of(self, environment: Any, worker: Worker) -> "ToolBox":
        """Return the same tools for another instance of the environment."""
        box = copy(self)
        box.methods, box.worker = public_methods(environment), worker
        box.tools = self.tools | box.methods
        return box

    @property
    def quick(self) -> bool:
        """Whether all tools are plain functions, and every call so far took less than PATIENCE."""
        return self.pace.quick

    def together(self, name: str) -> bool:
        """Whether calls of a tool run together with others of the same turn: async functions do, methods do not."""
        return name not in self.methods and inspect.iscoroutinefunction(self.tools.get(name))

    def call(self, name: str, arguments: Mapping[str, Any]) -> "Call":
        """Begin a call. `Call.result` waits for the answer."""
        return Call(self, name, arguments)


class Call:
    """A call in another thread, with the interface of a future."""

    def __init__(self, box: ToolBox, name: str, arguments: Mapping[str, Any]):
        self.box, self.began, self.answer = box, time.monotonic(), None
        tool = box.tools.get(name) if isinstance(name, str) else None
        missing = [] if tool is None or not isinstance(arguments, Mapping) else box.required[name] - arguments.keys()
        if tool is None or missing:
            unknown = f"there is no tool {name!r}; the tools are {', '.join(box.tools)}"
            problem = f"{name} needs {', '.join(sorted(missing))}" if missing else unknown
            self.work = Future()
            self.work.set_result((error_text(problem), True))
        elif inspect.iscoroutinefunction(tool):
            self.work = on_loop(_await(tool, arguments))
        else:
            self.work = in_thread(_call, tool, arguments, worker=box.worker if name in box.methods else None)
        self.ended = self.began
        self.work.add_done_callback(self._end)

    def _end(self, work):
        self.ended = time.monotonic()

    def result(self) -> Answer:
        """Wait for the answer, up to the time limit."""
        if self.answer is None:
            self.answer = self._wait()
        return self.answer

    def _wait(self):
        limit = self.box.timeout
        if not self._ends_within(PATIENCE):
            self.box.pace.quick = False
            if not self._ends_within(limit):
                latency = time.monotonic() - self.began
                renew_loop()
                self.work.cancel()
                return Answer(error_text(f"no answer within {limit:g} seconds"), True, True, latency)
        content, failed = self.work.result()
        return Answer(content, failed, latency_s=self.ended - self.began)

    def _ends_within(self, seconds):
        left = None if seconds is None else max(self.began + seconds - time.monotonic(), 0)
        try:
            self.work.result(left)
        except TimeoutError:  # a tool's own TimeoutError is an answer
            return False
        return True


def _call(tool, arguments):
    """Call a plain function; return the text of the answer, and whether the call failed."""
    try:
        return as_text(settled(tool(**copied(arguments)))), False
    except BaseException as error:
        return error_text(error), True


async def _await(tool, arguments):
    """As `_call`, for an async function."""
    try:
        return as_text(await tool(**copied(arguments))), False
    except BaseException as error:
        return error_text(error), True


def public_methods(environment: Any) -> dict[str, Callable]:
    """Return the methods of an environment that are tools: public ones but `reset` and `get_reward`."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    methods = [getattr(environment, name) for name in names if name not in OWN and not name.startswith("_")]
    return {method.__name__: method for method in methods}


def _schema(tool):
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:
        raise ValueError(
            f"tool {getattr(tool, '__qualname__', tool)!r} has no schema: {error}; it must be a function with a type "
            "annotation of each parameter, and with a docstring that describes them under 'Args:'"
        ) from error
