"""Reward functions: calling them as TRL does, and checking what they return."""

import dataclasses
import inspect
import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.config.sections import REWARD_ERRORS
from fastgrpo.data.prompts import copied, shortened
from fastgrpo.data.records import Completion, TrainerState
from fastgrpo.policy.load import choose_device
from fastgrpo.rewards.guard import Failure, attempt, awaited
from fastgrpo.rewards.model import Judge
from fastgrpo.rewards.notes import Notes
from fastgrpo.rewards.values import NUMBER, number, read_verdicts, shown

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judged:
    """The verdicts of the reward functions on some completions.

    Attributes:
        completions: The completions with `rewards`, `extras` and `steps` filled in.
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
    log_steps=, **columns)` with one item a completion, and returns one float a completion, None where it gives no
    verdict. It may be async. What it returns may also be a tuple, a generator, a 1-d tensor or array, or a pandas
    Series.

    All that a function gets is a copy made for it alone, one for each completion, so it may change what it gets. It
    may draw from the global random generators, which are seeded and saved with the run. After it, the working
    directory and the modes of torch are put back (`modes_kept`). Whatever it raises counts as its failure, SystemExit
    too; KeyboardInterrupt alone ends the run.

    A function is named by its `__name__`, and a second one of the same name by name_2.

    Args:
        functions: A function, or a list of them.
        weights: One weight for each function. Empty makes every weight 1.
        on_error: "raise" ends the run when a function fails; "skip" treats its reward as not given and counts the
            failure.
        shaping: Further functions, whose weight is 1. A completion to which `functions` give no reward gets none from
            these either.

    Raises:
        ValueError: There are no functions, one cannot be called or has a `full_mark` that is no number, or there are
            not as many weights as functions.
    """

    def __init__(
        self,
        functions: Callable | Sequence[Callable],
        weights: Sequence[float] = (),
        on_error: str = "raise",
        shaping: Sequence[Callable] = (),
    ):
        functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if not functions:
            raise ValueError("at least one reward function is needed")
        for function in functions:
            _check_function(function)
        if on_error not in REWARD_ERRORS:
            raise ValueError(f"reward_errors must be one of {', '.join(REWARD_ERRORS)}, got {on_error!r}")
        if weights and len(weights) != len(functions):
            raise ValueError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions")
        self.judges = len(functions)
        self.functions = [*functions, *shaping]
        self.names = _names(self.functions)
        weights = [*(weights or [1.0] * len(functions)), *[1.0] * len(shaping)]
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.on_error = on_error
        self.told = False  # whether a completion without any reward has been told of

    @property
    def models(self) -> list[Judge]:
        """The functions that are models."""
        return [function for function in self.functions if isinstance(function, Judge)]

    def device(self, policy: torch.device, name: str = "auto") -> torch.device:
        """Find the device of the models.

        Args:
            policy: The policy's device.
            name: The setting reward_device: auto is the policy's device.

        Returns:
            The device.

        Raises:
            ValueError: There is no such device, or no model among the functions for a stated one.
        """
        if name == "auto":
            return policy
        if not self.models:
            raise ValueError(
                f"reward_device={name} has an effect only where a reward is a model; leave it out, or name a model in "
                "reward_funcs"
            )
        return choose_device(name, "reward_device")

    def place(self, device: torch.device, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Move reward models to a device.

        Args:
            device: What `device` found.
            tokenizer: The policy's tokenizer, by which process reward models find the tokens of steps.
        """
        for model in self.models:
            model.place(device, tokenizer)

    def __call__(
        self,
        completions: Sequence[Completion],
        trainer_state: TrainerState | None = None,
        allow_none: bool = False,
        columns: Iterable[str] = (),
    ) -> Judged:
        """Judge completions.

        Args:
            completions: S completions.
            trainer_state: How far the run is, which is passed to the functions.
            allow_none: Whether it is allowed that no completion gets any reward.
            columns: Names of columns that the functions get in any case: None for each completion whose row has none.

        Returns:
            The completions with their rewards, and what was counted and logged.

        Raises:
            ValueError: A function raised, did not return S finite numbers or None, logged a column that another one
                logged, or all functions gave None for every completion. With on_error "skip" none of these is raised.
        """
        count = len(completions)
        notes = [Notes(count) for _ in self.functions]
        calls = [
            partial(_call, function, completions, trainer_state, own, columns)
            for function, own in zip(self.functions, notes, strict=True)
        ]
        results = awaited([attempt(call) for call in calls])
        per_function, errors = [], Counter()
        logged, extras, owners, steps = defaultdict(list), {}, {}, {}
        for name, result, own in zip(self.names, results, notes, strict=True):
            verdicts = result if isinstance(result, Failure) else attempt(partial(read_verdicts, result, count))
            for metric, values in own.metrics.items():
                logged[metric] += values
            for column, values in own.columns.items():
                if owners.setdefault(column, name) == name:
                    extras[column] = values
                elif not isinstance(verdicts, Failure):
                    verdicts = f"logs the column {column!r}, which {owners[column]!r} logs too; choose another name"
            if own.steps is not None and not isinstance(verdicts, Failure):
                steps[name], verdicts = own.steps, _beyond(own.steps, completions) or verdicts
            per_function.append(self._checked(name, verdicts, completions, errors))
        per_function = torch.stack(per_function, 1)
        per_function[per_function[:, : self.judges].isnan().all(1), self.judges :] = math.nan
        by_name = [dict(zip(self.names, rewards, strict=True)) for rewards in per_function.tolist()]
        done = [
            dataclasses.replace(
                completion,
                rewards=verdicts,
                extras={column: values[i] for column, values in extras.items()},
                # Those of a function that gave no verdict do not count either.
                steps={name: of[i] for name, of in steps.items() if of[i] and not math.isnan(verdicts[name])},
            )
            for i, (completion, verdicts) in enumerate(zip(completions, by_name, strict=True))
        ]
        if not allow_none:
            self.refuse_none(done)
        self._tell_silence(done)
        return Judged(done, errors, dict(logged))

    def _tell_silence(self, completions):
        """Warn once where no function gives a completion a reward."""
        silent = None if self.told else next((c for c in completions if all(map(math.isnan, c.rewards.values()))), None)
        if silent is not None:
            self.told = True
            logger.warning(
                "all reward functions returned None for a completion of the prompt %s, which has no advantage then; "
                "give every row a function that judges it",
                shortened(silent.prompt.prompt),
            )

    def refuse_none(self, completions: Sequence[Completion]) -> None:
        """Refuse completions of which none has a reward, unless failures are skipped.

        Args:
            completions: Judged completions.

        Raises:
            ValueError: None has a reward.
        """
        if self.on_error == "raise" and reward_matrix(completions)[:, : self.judges].isnan().all():
            raise ValueError(
                f"all rewards are None: {', '.join(self.names[: self.judges])} gave none of {len(completions)} "
                "completions a reward; do the rows have the columns that the functions read?"
            )

    def _checked(self, name, verdicts, completions, errors):
        """Return the rewards of one function, [S] fp64. `verdicts` are as `read_verdicts` gives them, or a failure."""
        count, first = len(completions), next(iter(completions), None)
        rewards = torch.full((count,), math.nan, dtype=torch.float64)
        if isinstance(verdicts, Failure):
            columns = ", ".join(first.prompt.columns if first else ()) or "(none)"
            problem = f"raised {verdicts}; the rows have the columns {columns}"
            self._fail(name, problem, errors, count, first, verdicts.error)
        elif isinstance(verdicts, str):
            self._fail(name, verdicts, errors, count, first)
        else:
            for i, verdict in enumerate(verdicts):
                if isinstance(verdict, str):
                    self._fail(name, verdict, errors, 1, completions[i])
                elif verdict is not None:
                    rewards[i] = verdict
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


def _check_function(function):
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
    mark = getattr(function, "full_mark", 1.0)
    if number(mark) is None:
        raise ValueError(
            f"reward function {getattr(function, '__name__', type(function).__name__)!r}: its attribute full_mark must "
            f"be {NUMBER}, got {shown(mark)}"
        )


def _names(functions):
    """Name each function; those that share a name are told apart by a number."""
    names = []
    for function in functions:
        while isinstance(function, partial):
            function = function.func
        name = getattr(function, "__name__", type(function).__name__)
        free = (name if i == 1 else f"{name}_{i}" for i in itertools.count(1))
        names.append(next(candidate for candidate in free if candidate not in names))
    return names


def _beyond(steps, completions):
    """Say which steps of a function end after their completion, as a problem; None where none does."""
    for i, (of_one, completion) in enumerate(zip(steps, completions, strict=True)):
        if of_one and of_one[-1][0] > len(completion.rollout.ids):
            tokens = len(completion.rollout.ids)
            return f"logs a step that ends at {of_one[-1][0]} for completion {i}, which has {tokens} tokens"
    return None


def _call(function, completions, trainer_state, notes, columns):
    """Call a function with copies made for it alone."""
    names = dict.fromkeys([*columns, *(name for completion in completions for name in completion.prompt.columns)])
    columns = {name: [copied(completion.prompt.columns.get(name)) for completion in completions] for name in names}
    return function(
        **columns
        | {
            "prompts": [copied(completion.prompt.prompt) for completion in completions],
            "completions": [copied(completion.content) for completion in completions],
            "completion_ids": [list(completion.rollout.ids) for completion in completions],
            "trainer_state": copied(trainer_state),
            "log_metric": notes.log_metric,
            "log_extra": notes.log_extra,
            "log_steps": notes.log_steps,
        }
    )
