"""Reward functions: finding them by name, calling them as TRL does, and checking what they return."""

import asyncio
import importlib
import inspect
import math
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch

from fastgrpo.data.prompts import shortened

ON_ERROR = ("raise", "skip")


def load_reward(spec, known=()):
    """A reward function from its name.

    Args:
        spec: the name of one of `known`, or "module:function". known: the task's functions.

    Raises:
        ValueError: no such name, module or function.
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
    except Exception as error:  # the module is a person's own: anything may go wrong in it
        raise ValueError(
            f"reward function {spec!r} cannot be imported: {type(error).__name__}: {error}; the module must be in the "
            "working directory's PYTHONPATH or installed"
        ) from error
    if not callable(function):
        raise ValueError(f"reward function {spec!r} is a {type(function).__name__}, which cannot be called")
    return function


class Rewards:
    """Named reward functions and their weights.

    A function is called as `f(prompts=, completions=, completion_ids=, trainer_state=, log_metric=, log_extra=,
    **columns)` with one item a completion, and returns one float a completion, None where it gives no verdict. It may
    be async.

    on_error: "raise", or "skip": what a function fails on counts as not given. `errors` counts, by name, the
    completions that the last call failed on. shaping: more functions, of weight 1, behind the others; where those
    give a completion no reward, these do not either.
    """

    def __init__(self, functions, weights=(), on_error="raise", shaping=()):
        if not functions:
            raise ValueError("at least one reward function is needed")
        if on_error not in ON_ERROR:
            raise ValueError(f"reward_errors must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        if weights and len(weights) != len(functions):
            raise ValueError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions")
        self.judges = len(functions)
        self.functions = [*functions, *shaping]
        self.names = [getattr(function, "__name__", type(function).__name__) for function in self.functions]
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"reward functions must have names of their own, got {', '.join(self.names)}")
        weights = [*(weights or [1.0] * len(functions)), *[1.0] * len(shaping)]
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.on_error, self.errors = on_error, Counter()

    def __call__(self, prompts, completions, completion_ids, *, trainer_state, log_metric, log_extra, allow_none=False):
        """Rewards of S completions.

        Args:
            prompts: [S] `Prompt`s, repeated for each completion. completions: [S] strings or message lists.
            completion_ids: [S] lists of token ids. trainer_state, log_metric, log_extra: handed on. allow_none: no
                reward at all is no error.

        Returns:
            [S, F] fp64, NaN where a function gave no verdict.

        Raises:
            ValueError: a function raised, or returned something else than S finite numbers or None; all gave None for
                every completion. With on_error "skip", neither.
        """
        # A data set's own completions must not stand in for the rollouts, nor its prompts for the rendered ones.
        taken = ("prompts", "completions", "completion", "completion_ids")
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns if name not in taken)
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        arguments = {
            "prompts": [prompt.prompt for prompt in prompts],
            "completions": completions,
            **columns,
            "completion_ids": completion_ids,
            "trainer_state": trainer_state,
            "log_metric": log_metric,
            "log_extra": log_extra,
        }
        self.errors = Counter()
        results = [_attempt(function, **arguments) for function in self.functions]
        if any(inspect.isawaitable(result) for result in results):
            results = _finished(_gather(results))
        verdicts = [
            self._checked(name, result, prompts, completions) for name, result in zip(self.names, results, strict=True)
        ]
        per_function = torch.stack(verdicts, 1)
        judged = per_function[:, : self.judges]
        if self.on_error == "raise" and not allow_none and judged.isnan().all():
            raise ValueError(
                f"all rewards are None: {', '.join(self.names[: self.judges])} gave none of {len(prompts)} completions "
                "a reward; do the rows have the columns that the functions read?"
            )
        per_function[judged.isnan().all(1), self.judges :] = math.nan
        return per_function

    def _checked(self, name, result, prompts, completions):
        """What one function returned, or the exception that it raised -> [S] fp64."""
        rewards = torch.full((len(prompts),), math.nan, dtype=torch.float64)
        if hasattr(result, "__iter__"):
            values = result = _attempt(list, result)  # a generator may raise, too
        if isinstance(result, Exception):
            problem = f"raised {_told(result)}; the rows have the columns {', '.join(prompts[0].columns) or '(none)'}"
            self._fail(name, problem, len(prompts), prompts[0], completions[0], result)
            return rewards
        if not isinstance(result, list):
            problem = f"returned {result!r:.60}, not a list"
            self._fail(name, problem, len(prompts), prompts[0], completions[0])
            return rewards
        if len(values) != len(prompts):
            problem = f"returned {len(values)} rewards for {len(prompts)} completions"
            self._fail(name, problem, len(prompts), prompts[0], completions[0])
            return rewards
        for i, value in enumerate(values):
            value = scalar(value)
            if value is None:
                continue
            if isinstance(value, (int, float)) and math.isfinite(value):
                rewards[i] = value
            else:
                problem = f"returned {value!r:.60} for completion {i}, not a finite number or None"
                self._fail(name, problem, 1, prompts[i], completions[i])
        return rewards

    def _fail(self, name, problem, count, prompt, completion, cause=None):
        """Count an error, or raise it with the sample it happened on (the first one of a whole call)."""
        if self.on_error == "skip":
            self.errors[name] += count
            return
        raise ValueError(
            f"reward function {name!r} {problem}; --reward_errors skip leaves such rewards out\n"
            f"  on the prompt {shortened(prompt.prompt)}, completion {shortened(completion)}"
        ) from cause

    def total(self, per_function):
        """[S, F] -> [S]: the weighted sum over the verdicts given; NaN where there is none."""
        total = (per_function * self.weights).nansum(1)
        return torch.where(per_function.isnan().all(1), math.nan, total)


def _attempt(function, *arguments, **named):
    """What a function returns, or the exception that it raises."""
    try:
        return function(*arguments, **named)
    except Exception as error:
        return error


def scalar(value):
    """A number of numpy's or torch's as Python's; anything else as it is."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # several numbers
        return value


def _finished(coroutine):
    """What a coroutine returns. Where this thread runs a loop already, as a notebook's does, another one runs it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def _gather(results):
    """Await what is awaitable, all at once; the rest as it is. An exception is a result."""
    pending = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    awaited = await asyncio.gather(*(results[i] for i in pending), return_exceptions=True)
    for i, result in zip(pending, awaited, strict=True):
        results[i] = result
    return results


def _told(error):
    """An exception and where it was raised, on one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({frame.filename}:{frame.lineno})"
