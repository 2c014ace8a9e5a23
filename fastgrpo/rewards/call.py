"""Reward functions: finding them by name, calling them as TRL does, and checking what they return."""

import asyncio
import dataclasses
import importlib
import inspect
import json
import math
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fastgrpo.config.sections import REWARD_ERRORS
from fastgrpo.data.prompts import shortened
from fastgrpo.data.records import Completion, TrainerState


def load_reward(spec: str, known: Sequence[Callable] = ()) -> Callable:
    """Find a reward function by its name.

    Args:
        spec: The name of one of `known`, or "module:function".
        known: The task's own functions.

    Returns:
        The function.

    Raises:
        ValueError: There is no such name, module or function.
    """
    by_name = {function.__name__: function for function in known}
    if spec in by_name:
        return by_name[spec]
    module, separator, name = spec.partition(":")
    if not separator:
        raise ValueError(
            f"no reward function {spec!r}; the task has {', '.join(by_name) or 'none'}; "
            "a function of your own is named module:function"
        )
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the user's own, and may raise anything
        raise ValueError(
            f"reward function {spec!r} cannot be imported: {type(error).__name__}: {error}; the module must be "
            "installed, or lie in the working directory or on the PYTHONPATH"
        ) from error
    if not callable(function):
        raise ValueError(f"reward function {spec!r} is a {type(function).__name__}, which cannot be called")
    return function


@dataclass(frozen=True)
class Judged:
    """The verdicts of the reward functions on some completions.

    Attributes:
        completions: The completions with `rewards` and `extras` filled in.
        errors: How many completions each function failed on, by name; empty where none did.
        logged: The values that functions passed to log_metric, by name.
    """

    completions: list[Completion]
    errors: Counter
    logged: dict[str, list[float]]


def reward_matrix(completions: Sequence[Completion]) -> torch.Tensor:
    """Put the rewards of completions side by side.

    Args:
        completions: S completions that the same F functions judged.

    Returns:
        [S, F] fp64, NaN where a function gave no verdict.
    """
    return torch.tensor([list(completion.rewards.values()) for completion in completions], dtype=torch.float64)


class Rewards:
    """Named reward functions and their weights.

    A function is called as `f(prompts=, completions=, completion_ids=, trainer_state=, log_metric=, log_extra=,
    **columns)` with one item a completion, and returns one float a completion, None where it gives no verdict. It may
    be async.

    Args:
        functions: The functions.
        weights: One weight for each function. Empty makes every weight 1.
        on_error: "raise" ends the run when a function fails; "skip" treats its reward as not given and counts the
            failure.
        shaping: Further functions, whose weight is 1. A completion to which `functions` give no reward gets none from
            these either.

    Raises:
        ValueError: There are no functions, two have the same name, or there are not as many weights as functions.
    """

    def __init__(
        self,
        functions: Sequence[Callable],
        weights: Sequence[float] = (),
        on_error: str = "raise",
        shaping: Sequence[Callable] = (),
    ):
        if not functions:
            raise ValueError("at least one reward function is needed")
        if on_error not in REWARD_ERRORS:
            raise ValueError(f"reward_errors must be one of {', '.join(REWARD_ERRORS)}, got {on_error!r}")
        if weights and len(weights) != len(functions):
            raise ValueError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions")
        self.judges = len(functions)
        self.functions = [*functions, *shaping]
        self.names = [getattr(function, "__name__", type(function).__name__) for function in self.functions]
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"reward functions must have names of their own, got {', '.join(self.names)}")
        weights = [*(weights or [1.0] * len(functions)), *[1.0] * len(shaping)]
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.on_error = on_error

    def __call__(
        self, completions: Sequence[Completion], trainer_state: TrainerState | None = None, allow_none: bool = False
    ) -> Judged:
        """Judge completions.

        Args:
            completions: S completions.
            trainer_state: How far the run is, which is passed to the functions.
            allow_none: Whether it is allowed that no completion gets any reward.

        Returns:
            The completions with their rewards, and what was counted and logged.

        Raises:
            ValueError: A function raised, or did not return S finite numbers or None, or all functions gave None for
                every completion. With on_error "skip" none of these is raised.
        """
        # A data set's own completions must not stand in for the rollouts, nor its prompts for the rendered ones.
        taken = ("prompts", "completions", "completion", "completion_ids")
        names = dict.fromkeys(name for c in completions for name in c.prompt.columns if name not in taken)
        logged, extras = defaultdict(list), {}
        arguments = {
            "prompts": [completion.prompt.prompt for completion in completions],
            "completions": [completion.content for completion in completions],
            **{name: [completion.prompt.columns.get(name) for completion in completions] for name in names},
            "completion_ids": [completion.rollout.ids for completion in completions],
            "trainer_state": trainer_state,
            "log_metric": lambda name, value: logged[name].append(float(value)),
            "log_extra": lambda column, values: extras.update({column: _extra(column, values, len(completions))}),
        }
        results = [_attempt(function, **arguments) for function in self.functions]
        if any(inspect.isawaitable(result) for result in results):
            results = _finished(_gather(results))
        errors = Counter()
        verdicts = [
            self._checked(name, result, completions, errors) for name, result in zip(self.names, results, strict=True)
        ]
        per_function = torch.stack(verdicts, 1)
        judged = per_function[:, : self.judges]
        if self.on_error == "raise" and not allow_none and judged.isnan().all():
            raise ValueError(
                f"all rewards are None: {', '.join(self.names[: self.judges])} gave none of {len(completions)} "
                "completions a reward; do the rows have the columns that the functions read?"
            )
        per_function[judged.isnan().all(1), self.judges :] = math.nan
        done = [
            dataclasses.replace(
                completion,
                rewards=dict(zip(self.names, rewards, strict=True)),
                extras={column: values[i] for column, values in extras.items()},
            )
            for i, (completion, rewards) in enumerate(zip(completions, per_function.tolist(), strict=True))
        ]
        return Judged(done, errors, dict(logged))

    def _checked(self, name, result, completions, errors):
        """Check what one function returned, or the exception that it raised. Returns [S] fp64."""
        count, first = len(completions), next(iter(completions), None)
        rewards = torch.full((count,), math.nan, dtype=torch.float64)
        if hasattr(result, "__iter__"):
            values = result = _attempt(list, result)  # a generator may raise, too
        if isinstance(result, Exception):
            columns = ", ".join(first.prompt.columns if first else ()) or "(none)"
            problem = f"raised {_told(result)}; the rows have the columns {columns}"
            self._fail(name, problem, errors, count, first, result)
            return rewards
        if not isinstance(result, list):
            problem = f"returned {result!r:.60}, not a list"
            self._fail(name, problem, errors, count, first)
            return rewards
        if len(values) != count:
            problem = f"returned {len(values)} rewards for {count} completions"
            self._fail(name, problem, errors, count, first)
            return rewards
        for i, value in enumerate(values):
            value = _scalar(value)
            if value is None:
                continue
            if isinstance(value, (int, float)) and math.isfinite(value):
                rewards[i] = value
            else:
                problem = f"returned {value!r:.60} for completion {i}, not a finite number or None"
                self._fail(name, problem, errors, 1, completions[i])
        return rewards

    def _fail(self, name, problem, errors, count, completion, cause=None):
        """Count an error, or raise it and name its completion (the first one where the whole call failed)."""
        if self.on_error == "skip":
            errors[name] += count
            return
        raise ValueError(
            f"reward function {name!r} {problem}; --reward_errors skip leaves such rewards out\n"
            f"  on the prompt {shortened(completion.prompt.prompt)}, completion {shortened(completion.content)}"
        ) from cause

    def total(self, per_function: torch.Tensor) -> torch.Tensor:
        """Add up the verdicts that were given, by weight.

        Args:
            per_function: [S, F], NaN where a function gave no verdict.

        Returns:
            [S] fp64; NaN where no function gave one.
        """
        total = (per_function * self.weights).nansum(1)
        return torch.where(per_function.isnan().all(1), math.nan, total)


def _attempt(function, *arguments, **named):
    """Call a function, and return its result or the exception that it raises."""
    try:
        return function(*arguments, **named)
    except Exception as error:
        return error


def _extra(column, values, count):
    """Check the values of an additional column of samples.jsonl, and return them as JSON can hold them."""
    values = [_scalar(value) for value in values]
    if len(values) != count:
        raise ValueError(f"log_extra({column!r}, ...) takes one value a completion: {count}, got {len(values)}")
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"log_extra({column!r}, ...) takes what JSON can hold: {error}") from None
    return values


def _scalar(value):
    """Convert a number of NumPy or torch to one of Python, and return anything else unchanged."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # several numbers
        return value


def _finished(coroutine):
    """Run a coroutine and return its result. Another thread runs it where this one has a loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def _gather(results):
    """Await all awaitable results at once, and return them with the others. An exception counts as a result."""
    pending = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    awaited = await asyncio.gather(*(results[i] for i in pending), return_exceptions=True)
    for i, result in zip(pending, awaited, strict=True):
        results[i] = result
    return results


def _told(error):
    """Describe an exception, and where it was raised, on one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({frame.filename}:{frame.lineno})"
