"""Reward functions: finding them by name, calling them as TRL does, and checking what they return."""

import asyncio
import importlib
import inspect
import math

import torch


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
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward function {spec!r} cannot be imported: {error}") from error


class Rewards:
    """Named reward functions and their weights.

    A function is called as `f(prompts=, completions=, completion_ids=, trainer_state=, log_metric=, log_extra=,
    **columns)` with one item a completion, and returns one float a completion, None where it gives no verdict. It may
    be async.
    """

    def __init__(self, functions, weights=()):
        if not functions:
            raise ValueError("at least one reward function is needed")
        if weights and len(weights) != len(functions):
            raise ValueError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions")
        self.functions = list(functions)
        self.names = [getattr(function, "__name__", type(function).__name__) for function in functions]
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"reward functions must have names of their own, got {', '.join(self.names)}")
        self.weights = torch.tensor(weights or [1.0] * len(functions), dtype=torch.float64)

    def __call__(self, prompts, completions, completion_ids, *, trainer_state, log_metric, log_extra):
        """Rewards of S completions.

        Args:
            prompts: [S] `Prompt`s, repeated for each completion. completions: [S] strings or message lists.
            completion_ids: [S] lists of token ids. trainer_state, log_metric, log_extra: handed on.

        Returns:
            [S, F] fp64, NaN where a function gave no verdict.

        Raises:
            ValueError: a function returned something else than S finite numbers or None.
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
        results = [function(**arguments) for function in self.functions]
        if any(inspect.isawaitable(result) for result in results):
            results = asyncio.run(_gather(results))
        return torch.stack(
            [_checked(name, list(result), len(prompts)) for name, result in zip(self.names, results, strict=True)], 1
        )

    def total(self, per_function):
        """[S, F] -> [S]: the weighted sum over the verdicts given; NaN where there is none."""
        total = (per_function * self.weights).nansum(1)
        return torch.where(per_function.isnan().all(1), math.nan, total)


async def _gather(results):
    """Await what is awaitable, all at once; the rest as it is."""
    pending = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    for i, result in zip(pending, await asyncio.gather(*(results[i] for i in pending)), strict=True):
        results[i] = result
    return results


def _checked(name, values, count):
    if len(values) != count:
        raise ValueError(f"reward function {name!r} returned {len(values)} rewards for {count} completions")
    for i, value in enumerate(values):
        if hasattr(value, "item"):  # a numpy or torch scalar
            values[i] = value = value.item()
        if value is None:
            values[i] = math.nan
        elif not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"reward function {name!r} returned {value!r} for completion {i}; a finite number or None")
    return torch.tensor(values, dtype=torch.float64)
