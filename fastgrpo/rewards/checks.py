"""What may be given as a reward function, and by which name it goes."""

import inspect
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from fastgrpo.rewards.values import NUMBER, number, shown


def check_function(function: Any) -> None:
    """Refuse what cannot be called as a reward function."""
    if inspect.isclass(function):
        raise ValueError(f"reward_funcs: {function.__name__} is a class; pass an instance that can be called")
    if isinstance(function, PreTrainedModel):
        raise ValueError(
            f"reward_funcs: {type(function).__name__} is a model, which takes tokens; "
            "fastgrpo.rewards.reward_model.RewardModel makes a function of it and its tokenizer"
        )
    if not callable(function):
        raise ValueError(
            f"reward_funcs: {shown(function)} of type {type(function).__name__} cannot be called; pass a function "
            "f(prompts, completions, **columns) or a list of them"
            + ("; fastgrpo.rewards.find_reward finds module:function" if isinstance(function, str) else "")
        )
    _check_signature(function)
    mark = getattr(function, "full_mark", 1.0)
    if number(mark) is None:
        raise ValueError(
            f"reward function {getattr(function, '__name__', type(function).__name__)!r}: its attribute full_mark must "
            f"be {NUMBER}, got {shown(mark)}"
        )


def _check_signature(function):
    """Refuse a function that does not take all that it would be called with, before any completion is drawn for it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables of C do not tell
        return
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        name = getattr(function, "__name__", type(function).__name__)
        taken = ", ".join(map(str, parameters))
        raise ValueError(
            f"reward function {name!r} takes ({taken}), and is called with prompts, completions, completion_ids, every "
            f"column of the rows and more, all by name; write {name}(completions, **columns), with the columns that it "
            "reads named before **columns"
        )


def names_of(functions: Sequence[Callable]) -> list[str]:
    """Name each function; those that share a name are told apart by a number."""
    names = []
    for function in functions:
        while isinstance(function, partial):
            function = function.func
        name = getattr(function, "__name__", type(function).__name__)
        free = (name if i == 1 else f"{name}_{i}" for i in itertools.count(1))
        names.append(next(candidate for candidate in free if candidate not in names))
    return names
