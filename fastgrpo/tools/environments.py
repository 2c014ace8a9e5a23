"""Environments: objects with a state, whose public methods are the tools of one completion.

An instance serves one completion at a time: `start` takes it from the pool and resets it, and `give_back` returns it
after its rewards were computed. An instance that failed is thrown away, because a tool may still run in it.
"""

import hashlib
import inspect
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastgrpo.config.fields import did_you_mean
from fastgrpo.data.prompts import copied, shortened
from fastgrpo.rewards.guard import TIMED_OUT, attempt
from fastgrpo.tools.calls import PATIENCE, ToolBox, Worker, as_text, in_thread, on_loop, renew_loop, settled

logger = logging.getLogger(__name__)
COLUMN = "environment"  # column of the data set that names the environment, if there are several


def seed_of(*place: int) -> int:
    """Derive the seed of a reset, from 0 to 2^31 - 1, from its place: run seed, step, batch, prompt and completion.

    So it does not depend on the order of execution.
    """
    return int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:4]) >> 1


@dataclass(eq=False)
class Episode:
    """The start of one completion."""

    name: str | None  # of the environment; None if it has no name
    environment: Any  # the instance after its reset; None without environments, and if the reset failed
    box: ToolBox
    messages: list[dict]  # the prompt, with the text that the reset returned
    # Whether the reset raised, a tool timed out, or a call still ran at the end of the completion. The completion then
    # gets no reward from `get_reward`.
    failed: bool = False
    error: str | None = None  # why the reset failed


class Environments:
    """The environments and tools of a run.

    An environment has a method `reset(**row)`, which returns None, text or blocks of text: they are appended to the
    last user message. A parameter `seed` of `reset` gets a seed, unless the row has a column of this name. Methods may
    be async. After a call, a true attribute `done` ends the completion with "env_done", and a true attribute
    `env_error` with "env_error". `get_reward()` returns the reward of the completion.

    `factory` makes an environment, or is a dict of factories by the column `environment` of a row. The constructor
    raises ValueError if a tool has no schema, or an environment cannot be made or has no `reset`.
    """

    def __init__(
        self,
        factory: Callable | Mapping[str, Callable] | None = None,
        tools: Sequence[Callable] = (),  # functions that all completions may call
        timeout: float | None = None,  # of a reset and of each call, in seconds
    ):
        self.routed = isinstance(factory, Mapping)
        self.factories = dict(factory) if self.routed else {None: factory}
        self.timeout, self.active, self.warned = timeout, {}, False
        self.reward_timeout = None  # of a `get_reward`, in seconds
        self.boxes, self.idle, self.resets = {}, {}, {}
        self.workers = {}  # the thread of each instance, by its id
        weakref.finalize(self, _close, self.workers)
        kinds = {}
        for name, make in self.factories.items():
            self.idle[name] = deque()
            instance = None if make is None else self._probe(name, make)
            self.boxes[name] = ToolBox(tools, timeout, instance)
            if instance is not None:
                self.idle[name].append(instance)
                self.resets[name] = inspect.signature(instance.reset)
                if callable(getattr(instance, "get_reward", None)):
                    kinds.setdefault(type(instance))
        self.rewards = [self._reward(kind) for kind in kinds]  # reward functions named after the classes, weight 1

    def _probe(self, name, make):
        shown = "environment_factory" if name is None else f"environment {name!r}"
        worker = Worker()
        try:
            instance = in_thread(make, worker=worker).result()
        except Exception as error:
            worker.close()
            raise ValueError(f"{shown} cannot be made: {type(error).__name__}: {error}") from error
        if not callable(getattr(instance, "reset", None)):
            raise ValueError(f"{shown} made a {type(instance).__name__}, which has no method reset; add one")
        self.workers[id(instance)] = worker
        return instance

    def _reward(self, kind):
        """Make a reward function of `get_reward` of a class."""

        def get_reward(environments, **columns):
            own = [type(one) is kind and not self._failed(one) for one in environments]
            values = [
                self._result(one, in_thread(one.get_reward, worker=self.workers[id(one)]), time.monotonic())
                if mine
                else None
                for one, mine in zip(environments, own, strict=True)
            ]
            begun = [on_loop(value) if inspect.isawaitable(value) else value for value in values]
            now, pairs = time.monotonic(), zip(environments, begun, strict=True)
            return [self._result(one, value, now) if isinstance(value, Future) else value for one, value in pairs]

        get_reward.__name__ = kind.__name__
        get_reward.pooled = False  # the instances are in this process
        get_reward.limit = partial(setattr, self, "reward_timeout")
        return get_reward

    def _result(self, environment, future, began):
        """Return the reward of a `get_reward`, a `Failure` or `TIMED_OUT`.

        An instance that exceeds the limit is not used again.
        """
        if not wait([future], _left(self.reward_timeout, began)).done:
            future.cancel()
            renew_loop()
            if id(environment) in self.active:
                self.active[id(environment)].failed = True
            return TIMED_OUT
        return attempt(future.result)

    def _failed(self, environment):
        return id(environment) in self.active and self.active[id(environment)].failed

    def name_of(self, row: Mapping[str, Any]) -> str | None:
        """Return the name of a row's environment."""
        if not self.routed:
            return None
        name = row.get(COLUMN)
        if name not in self.factories:
            raise ValueError(
                f"{name!r} in the column {COLUMN!r} is not among the environments {', '.join(self.factories)}"
                f"{did_you_mean(str(name), self.factories)}"
            )
        return name

    def start(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[Episode]:
        """Start a completion of each row: take an instance, and reset it with the seed.

        Quick environments are reset one after another, in the order of the rows; slow ones together. A reset that
        raises or exceeds the time limit gives a failed episode, which ends after its first turn.
        """
        begun = []
        for row, seed in zip(rows, seeds, strict=True):
            name, messages = self.name_of(row), _messages(row)
            if self.factories[name] is None:
                begun.append((name, messages, None, None, None, 0.0))
                continue
            given = copied(self.arguments(row, seed))
            instance = self.idle[name].popleft() if self.idle[name] else None
            worker = Worker() if instance is None else self.workers.pop(id(instance))
            reset = in_thread(self._reset, name, instance, given, worker=worker)
            begun.append((name, messages, instance, worker, reset, time.monotonic()))
            wait([reset], PATIENCE)
        return [self._episode(*one) for one in begun]

    def arguments(self, row: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
        """Return the arguments of a row's reset, or raise ValueError if it cannot take the row."""
        name = self.name_of(row)
        if self.factories[name] is None:
            return {}
        parameters = self.resets[name].parameters
        every = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        row = {column: value for column, value in row.items() if not (self.routed and column == COLUMN)}
        given = {column: value for column, value in row.items() if every or column in parameters}
        if "seed" in parameters:
            given.setdefault("seed", seed)
        try:
            self.resets[name].bind(**given)
        except TypeError as error:
            raise ValueError(
                f"reset{self.resets[name]} of an environment cannot take the columns {', '.join(row)}: {error}; let it "
                "require only columns of the rows"
            ) from None
        return given

    def _reset(self, name, instance, given):
        instance = self.factories[name]() if instance is None else instance
        observed = settled(instance.reset(**given))
        if isinstance(observed, (str, list)):
            return instance, as_text(observed)
        if observed is not None:
            raise TypeError(f"reset returned a {type(observed).__name__}; it may return None, text or blocks of text")
        return instance, ""

    def _episode(self, name, messages, instance, worker, reset, began):
        """Wait for a reset."""
        if reset is None:
            return Episode(name, None, self.boxes[name], messages)
        try:
            instance, observed = reset.result(_left(self.timeout, began))
            messages, problem = _observed(messages, observed), None
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not reset.done():
                raise  # from the user, not from the reset
            instance = None  # it still has the state of another completion, or none
            problem = f"{type(error).__name__}: {error}"
            if not reset.done():
                problem = f"no answer within {self.timeout} seconds"
                renew_loop()
            if not self.warned:
                self.warned = True
                logger.warning("An environment could not be reset (%s). Such completions end with env_error.", problem)
        box = self.boxes[name] if instance is None else self.boxes[name].of(instance, worker)
        episode = Episode(name, instance, box, messages, problem is not None, problem)
        if instance is None:
            worker.close()
        else:
            self.active[id(instance)], self.workers[id(instance)] = episode, worker
        return episode

    def give_back(self, episodes: Iterable[Episode]) -> None:
        """Return the instances to the pool after their rewards were computed. Failed ones are thrown away."""
        for episode in episodes:
            if self.active.pop(id(episode.environment), None) is not episode:
                continue
            if episode.failed:
                self.workers.pop(id(episode.environment)).close()
            else:
                self.idle[episode.name].append(episode.environment)


def _left(limit, began):
    """Return the seconds that are left of a time limit (None: no limit)."""
    return None if limit is None else max(began + limit - time.monotonic(), 0)


def _close(workers):
    for worker in workers.values():
        worker.close()


def _messages(row):
    """Return the prompt of a row. An environment may write all of it, in its reset."""
    prompt = row.get("prompt", [{"role": "user", "content": ""}])
    if not isinstance(prompt, list):
        raise ValueError(
            f"tools need a prompt of messages, got {shortened(prompt)}; make it [{{'role': 'user', 'content': ...}}]"
        )
    return prompt


def _observed(messages, text):
    """Append what a reset returned to the last user message."""
    if not text:
        return messages
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    at = users[-1] if users else len(messages) - 1
    content = messages[at].get("content") or ""
    joined = {**messages[at], "content": (content if isinstance(content, str) else as_text(content)) + text}
    return [*messages[:at], joined, *messages[at + 1 :]]
