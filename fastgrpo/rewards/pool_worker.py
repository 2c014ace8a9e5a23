"""The process in which a pool of rewards runs a function: it reads calls from a pipe and answers on it.

It imports the standard library alone, so that a worker that replaces a killed one is there in a tenth of a second
where the function itself needs nothing that is slow to import. What a call logs goes back as a list of what was
called, which the trainer's process checks and keeps.

Messages to a worker are a `Start`, the state of the run where it changed, and jobs. A job is one call of a plain
function, or several calls of an async one, which run together. Each message back is (kind, number of the job, call,
value).
"""

import asyncio
import inspect
import itertools
import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable, Mapping, Set
from copy import deepcopy
from multiprocessing import spawn
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Start(NamedTuple):
    """What a worker needs before its first call.

    Attributes:
        arguments: The command line of the trainer's process.
        script: The file of its main module; None where no function lies there.
        module: The name of its main module, where it was run as one; else None.
        functions: The functions, as pickle sends them.
    """

    arguments: list[str]
    script: str | None
    module: str | None
    functions: bytes


class Given(NamedTuple):
    """The arguments of one call.

    Attributes:
        arguments: By name, without those that every call has.
        logs: The names of the functions that log.
        count: How many completions it judges.
    """

    arguments: dict[str, Any]
    logs: tuple[str, ...]
    count: int


class Raised(NamedTuple):
    """What a function raised, described where it was raised.

    Attributes:
        told: The exception and where it was raised, on one line.
        trace: The whole traceback.
    """

    told: str
    trace: str


class Returned(NamedTuple):
    """What a function returned and logged.

    Attributes:
        result: What it returned; a list for what can be iterated over.
        logged: The name of the function that it logged by, and copies of the arguments, in the order of the calls.
    """

    result: Any
    logged: list[tuple[str, tuple, dict]]


starting = False  # whether this process is a worker that imports its functions


def told(error: BaseException) -> Raised:
    """Describe an exception as the trainer's process describes one that was raised there."""
    frames = traceback.extract_tb(error.__traceback__)
    trace = "".join(traceback.format_exception(error))
    while isinstance(error, BaseExceptionGroup):  # as asyncio.TaskGroup raises them
        error = error.exceptions[0]
    try:
        text = " ".join(str(error).split())[:200]
    except Exception:  # the class of the exception may be the user's own, too
        text = "(without a text)"
    frames = traceback.extract_tb(error.__traceback__) or frames
    theirs = [frame for frame in frames if not frame.filename.startswith((PACKAGE, "<frozen"))] or frames
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return Raised(type(error).__name__ + (f": {text}" if text else "") + place, trace)


def run(connection: Connection) -> None:
    """Answer calls until the trainer's process closes the pipe."""
    try:
        functions = _load(connection.recv())
    except BaseException as error:  # whatever a module does while it is imported
        connection.send(("broken", 0, 0, told(error)))
        return
    connection.send(("ready", 0, 0, None))
    folder, state = os.getcwd(), None
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as loop:
        while True:
            try:
                kind, *message = connection.recv()
            except (EOFError, ConnectionError):
                return
            if kind == "state":
                state = message[0]
                continue
            number, which, is_async, calls, seed, limit = message
            answer = _Answers(connection, number)
            if is_async:
                loop.run(_together(functions[which], calls, state, seed, limit, answer))
            else:
                answer(0, _call(functions[which], calls[0], state, seed, loop))
            answer.end()
            os.chdir(folder)


def _load(start):
    """Become what the trainer's process is to the functions: the same imports, and the same main module if needed."""
    global starting
    sys.argv[:] = start.arguments
    starting = True
    if start.script is not None or start.module is not None:
        main = {"init_main_from_name": start.module} if start.module else {"init_main_from_path": start.script}
        spawn.prepare(main)
    functions = pickle.loads(start.functions)
    starting = False
    return functions


class _Answers:
    """Sends what calls gave, each as soon as it is known."""

    def __init__(self, connection, number):
        self.connection, self.number = connection, number
        connection.send(("began", number, 0, None))

    def __call__(self, call, value):
        try:
            sent = pickle.dumps(value)
        except Exception as error:  # PicklingError, TypeError, or what the user's own class raises
            sent = pickle.dumps(Raised(f"{type(error).__name__}: its result cannot leave its process: {error}", ""))
        self.connection.send(("done", self.number, call, sent))

    def end(self):
        self.connection.send(("end", self.number, 0, None))


def _arguments(given, state):
    """Add to the arguments of a call what is not sent with each: the functions that log, and the state of the run."""
    logged = []

    def logging_by(name: str) -> Callable:
        return lambda *args, **named: logged.append((name, *pickle.loads(pickle.dumps((args, named)))))

    logs = {name: logging_by(name) for name in given.logs}
    return given.arguments | logs | {"trainer_state": plain_state(state)}, logged


def _call(function, given, state, seed, loop):
    """Call a plain function, or await what it gives."""
    arguments, logged = _arguments(given, state)
    _seed(seed)
    process = os.getpid()
    try:
        result = function(**arguments)
        if os.getpid() != process:
            os._exit(0)
        if inspect.isawaitable(result):
            result = loop.run(_awaited(result))
        return Returned(_listed(result, given.count), logged)
    except BaseException as error:
        if os.getpid() != process:  # two processes must not answer on one pipe
            traceback.print_exc()
            os._exit(1)
        return told(error)


async def _awaited(result):
    return await result


async def _together(function, calls, state, seed, limit, answer):
    """Run the calls of an async function at the same time, each within the limit."""
    _seed(seed)

    async def one(i: int) -> None:
        given = calls[i]
        arguments, logged = _arguments(given, state)
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                result = await function(**arguments)
            answer(i, Returned(_listed(result, given.count), logged))
        except BaseException as error:
            answer(i, None if scope.expired() and isinstance(error, TimeoutError) else told(error))

    await asyncio.gather(*map(one, range(len(calls))))


def _seed(seed):
    """Seed the global random generators of what is imported."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed % 2**63)


def _listed(result, count):
    """Make a list of what a function returned where it gives items, so that it can be sent."""
    if hasattr(result, "tolist") and not hasattr(result, "columns"):
        return result.tolist()
    is_text = isinstance(result, (str, bytes, bytearray, Mapping, Set)) or hasattr(result, "columns")
    if is_text or not hasattr(result, "__iter__"):
        return result
    items = itertools.islice(result, count + 1)
    return [item.item() if hasattr(item, "item") else item for item in items]


def plain_state(state: Any) -> SimpleNamespace | None:
    """Make an object with the attributes of the trainer's state, which needs no module of the project to be read."""
    if state is None:
        return None
    values = {name: list(value) if name == "log_history" else deepcopy(value) for name, value in vars(state).items()}
    return SimpleNamespace(**values)
