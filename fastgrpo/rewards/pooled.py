"""Reward functions that a pool of processes runs: what is sent of completions, and what comes back."""

import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from fastgrpo.config.sections import POOL_WORKERS
from fastgrpo.data.records import Completion, TrainerState
from fastgrpo.rewards.guard import Failure, attempt
from fastgrpo.rewards.notes import LOGS, Notes
from fastgrpo.rewards.pool import TIMED_OUT, Pool
from fastgrpo.rewards.pool_worker import Given, Raised, plain_state
from fastgrpo.rewards.values import read_verdicts


class Call(NamedTuple):
    """A call that was begun.

    Attributes:
        count: How many completions it judges.
        result: What it gives.
    """

    count: int
    result: Future


class Pooled:
    """Has functions judge completions in a pool of processes.

    A plain function gets one completion at a time, so that the limit is that of a completion. One with the attribute
    `group_wise = True` gets all completions that are begun together, with as many times the limit. An async one gets
    one completion in each call, and the calls of what is begun together run at the same time.
    """

    def __init__(self, functions: Mapping[str, Callable], timeout: float | None, workers: int, seed: int):
        self.functions, self.timeout, self.seed = dict(functions), timeout, seed
        self.pool = Pool(self.functions, workers)
        self.told = None  # the state of the run that the processes have

    def begin(
        self, key: int, completions: Sequence[Completion], state: TrainerState | None, columns: Iterable[str] = ()
    ) -> dict[str, list[Call]]:
        """Begin to judge completions."""
        now = plain_state(state)  # an evaluation changes the state between two steps, too
        if self.told != now:
            self.pool.tell(now)
            self.told = now
        step = None if state is None else state.global_step
        columns, calls = tuple(columns), {}
        for name, function in self.functions.items():
            together = _is_async(function)
            size = len(completions) if getattr(function, "group_wise", False) else 1
            parts = [completions[i : i + size] for i in range(0, len(completions), size)]
            given = [Given(arguments(part, columns), LOGS, len(part)) for part in parts]
            limit = None if self.timeout is None else self.timeout * size
            seeds = [self._seed(step, key, i, name) for i in range(len(given))]
            if together:
                results = self.pool.submit(name, given, seeds[0], limit, together=True)
            else:
                results = [
                    self.pool.submit(name, [one], seed, limit)[0] for one, seed in zip(given, seeds, strict=True)
                ]
            calls[name] = [Call(one.count, result) for one, result in zip(given, results, strict=True)]
        return calls

    def _seed(self, *where):
        """Return a seed that depends on the place of a call in the run, and not on the process that makes it."""
        return int.from_bytes(hashlib.sha256(repr((self.seed, *where)).encode()).digest()[:8])

    def collect(self, calls: Sequence[Call], notes: Notes) -> list[Any]:
        """Wait for calls of one function."""
        verdicts = []
        for call in calls:
            own, outcome = Notes(call.count), call.result.result()
            if outcome is TIMED_OUT:
                verdict = TIMED_OUT
            elif isinstance(outcome, Raised):
                verdict = Failure(None, outcome.told)
            else:
                verdict = attempt(partial(_read, outcome, own, call.count))
            notes.take(own, len(verdicts))
            verdicts += verdict if isinstance(verdict, list) else [verdict] * call.count
        return verdicts

    def close(self) -> None:
        """End the processes. They start again where more is begun."""
        self.pool.close()


def pooled(function: Callable) -> bool:
    """Tell whether a pool may run a function; one that brings a model or processes of its own says that it may not."""
    return getattr(function, "pooled", True)


def workers_of(timeout: float | None, workers: int | None) -> int:
    """Choose the number of processes."""
    if workers is not None:
        return workers
    return 0 if timeout is None else min(cores(), POOL_WORKERS)


def cores() -> int:
    """Count the cores that this rank may keep busy."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun sets it
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def arguments(completions: Sequence[Completion], columns: Iterable[str]) -> dict[str, list]:
    """Make the arguments of a call that have one item a completion."""
    names = dict.fromkeys([*columns, *(name for completion in completions for name in completion.prompt.columns)])
    given = {name: [completion.prompt.columns.get(name) for completion in completions] for name in names}
    return given | {
        "prompts": [completion.prompt.prompt for completion in completions],
        "completions": [completion.content for completion in completions],
        "completion_ids": [list(completion.rollout.ids) for completion in completions],
    }


def _is_async(function):
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _read(outcome, notes, count):
    """Read what a call returned and logged. Raises ValueError where it logged what cannot be logged."""
    for name, args, named in outcome.logged:
        getattr(notes, name)(*args, **named)
    return read_verdicts(outcome.result, count)
