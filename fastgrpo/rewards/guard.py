"""Runs reward functions safely: exceptions become values, and changed modes are restored.

A reward function is the user's code. It may raise anything, and change modes of the process. The package runs such code
only through `attempt`.
"""

import asyncio
import atexit
import contextlib
import contextvars
import inspect
import itertools
import math
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TIMED_OUT = object()  # the result of a call, or of one completion, that exceeded its limit
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time per period, and the period
_OWN = threading.local()  # the event loop of each thread
os.register_at_fork(after_in_child=lambda: vars(_OWN).clear())  # two processes must not wait in one loop


@dataclass(frozen=True)
class Failure:
    """The failure of a reward function: the exception (None from another process), and its description on one line."""

    error: BaseException | None
    told: str = ""

    def __str__(self) -> str:
        return self.told or described(self.error).told


def described(error: BaseException) -> Failure:
    """Describe an exception and its location, in a form that can be sent."""
    frames = traceback.extract_tb(error.__traceback__)
    while isinstance(error, BaseExceptionGroup):  # as asyncio.TaskGroup raises them
        error = error.exceptions[0]
    try:
        text = " ".join(str(error).split())[:200]
    except Exception:  # the class of the exception may be the user's own, too
        text = "(without a text)"
    frames = traceback.extract_tb(error.__traceback__) or frames
    theirs = [frame for frame in frames if not frame.filename.startswith((_PACKAGE, "<frozen"))] or frames
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return Failure(None, type(error).__name__ + (f": {text}" if text else "") + place)


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of user code, or a `Failure`. Restore the working directory and the modes of torch."""
    try:
        with modes_kept():
            result = call()
    except BaseException as error:
        result = Failure(error)
    error = result.error if isinstance(result, Failure) else None
    if isinstance(error, KeyboardInterrupt):
        raise error
    return result


@contextlib.contextmanager
def modes_kept() -> Iterator[None]:
    """Make a context that restores the working directory, and torch's gradient and inference modes."""
    import torch  # here, because the processes of a pool do not need it

    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    # A descriptor still finds a folder that was renamed or deleted.
    folder = os.open(".", os.O_RDONLY | getattr(os, "O_PATH", 0))
    try:
        # Only the context that entered inference mode can leave it. This one restores the earlier mode, even if async
        # functions left their own contexts in another order than they entered them.
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            yield
    finally:
        os.fchdir(folder)
        os.close(folder)


def awaited(results: Sequence[Any]) -> list[Any]:
    """Await the results of async reward functions, all at once.

    All calls of a thread use one event loop, because a client or semaphore works only in the loop of its first use. If
    a function closes the loop, the next call creates another.
    """
    done, pending = list(results), [i for i, result in enumerate(results) if inspect.isawaitable(result)]

    async def settle(i: int) -> None:
        try:
            done[i] = await results[i]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            done[i] = Failure(error)

    async def settle_all() -> None:
        await asyncio.gather(*map(settle, pending))

    ended = attempt(lambda: _run(settle_all)) if pending else None
    if isinstance(ended, Failure):  # a task that a function started raised SystemExit, which ends the event loop
        for i in pending:
            if done[i] is results[i] or isinstance(getattr(done[i], "error", None), asyncio.CancelledError):
                done[i] = ended
    return done


def _run(function):
    """Run an async function in the loop of this thread, or in another thread if a loop is running, as in a notebook."""
    if not hasattr(_OWN, "loop"):
        _OWN.loop = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        atexit.register(_OWN.loop.close)
    loop, context = _OWN.loop, contextvars.copy_context()

    def run():
        try:
            return loop.run(function(), context=context)
        except BaseException:
            loop.close()  # cancels the remaining tasks
            raise

    try:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return run()
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()
    except BaseException:
        atexit.unregister(loop.close)
        del _OWN.loop
        raise


def cores() -> int:
    """Return the number of cores that this rank may use."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun sets it
    return max(1, min(len(os.sched_getaffinity(0)), _quota()) // ranks)


def _quota():
    """Return the CPU quota of this container in cores, rounded up, or infinity."""
    with contextlib.suppress(OSError, ValueError):  # without a quota, the first word is max
        quota, period = CPU_QUOTA.read_text().split()
        return math.ceil(int(quota) / int(period))
    return math.inf


def listed(values: Any, count: int) -> list | None:
    """Return a list, tuple, generator, 1-d tensor or pandas Series as a list of at most count + 1 items, else None."""
    no_list = isinstance(values, (str, bytes, bytearray, Mapping, Set)) or hasattr(values, "columns")
    if no_list or not hasattr(values, "__iter__"):
        return None
    return list(itertools.islice(values, count + 1))


def plain(value: Any) -> Any:
    """Convert a number of NumPy or torch to one of Python."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # several numbers
        return value


def shown(value: Any) -> str:
    """Format the start of a value on one line, for an error message."""
    try:
        return " ".join(repr(value).split())[:60]
    except Exception:  # such as the repr of an integer with more than 4,300 digits
        return f"a value of type {type(value).__name__}"
