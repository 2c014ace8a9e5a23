"""Reward functions: calling them as TRL does, and checking what they return."""

import dataclasses
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fastgrpo.config.sections import REWARD_ERRORS
from fastgrpo.data.prompts import copied, shortened
from fastgrpo.data.records import Completion, TrainerState
from fastgrpo.policy.device import choose_device
from fastgrpo.rewards.checks import check_function, names_of
from fastgrpo.rewards.guard import Failure, attempt, awaited, slowness_told
from fastgrpo.rewards.model import Judge
from fastgrpo.rewards.notes import LOGS, Notes
from fastgrpo.rewards.pool import TIMED_OUT
from fastgrpo.rewards.pooled import Call, Pooled, arguments, pooled, workers_of
from fastgrpo.rewards.values import read_verdicts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judged:
    """The verdicts of the reward functions on some completions.

    Attributes:
        completions: The completions with `rewards`, `extras` and `steps` filled in.
        errors: How many completions each function failed on, by name; empty where none did.
        logged: The values that functions passed to log_metric, by name.
        timeouts: For how many completions each function took too long, by name; empty where none did.
    """

    completions: list[Completion]
    errors: Counter
    logged: dict[str, list[float]]
    timeouts: Counter = field(default_factory=Counter)


def reward_matrix(completions: Sequence[Completion]) -> torch.Tensor:
    """Put the rewards of completions side by side.

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

    With a limit of time or with workers, functions run in processes of their own: see `Pooled`. There, one gets a
    single completion in a call, and the global random generators are seeded for each call.
    """

    def __init__(
        self,
        functions: Callable | Sequence[Callable],
        weights: Sequence[float] = (),
        on_error: str = "raise",
        shaping: Sequence[Callable] = (),
        timeout: float | None = None,
        workers: int | None = None,
        seed: int = 0,
    ):
        functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if not functions:
            raise ValueError("at least one reward function is needed")
        for function in functions:
            check_function(function)
        if on_error not in REWARD_ERRORS:
            raise ValueError(f"reward_errors must be one of {', '.join(REWARD_ERRORS)}, got {on_error!r}")
        if weights and len(weights) != len(functions):
            raise ValueError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions")
        self.judges = len(functions)
        self.functions = [*functions, *shaping]
        self.names = names_of(self.functions)
        weights = [*(weights or [1.0] * len(functions)), *[1.0] * len(shaping)]
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.on_error = on_error
        self.told = False  # whether a completion without any reward has been told of
        if timeout is not None and workers == 0:
            raise ValueError("reward_timeout needs processes that can be killed: leave reward_workers out, or raise it")
        for function in self.functions if timeout is not None else ():
            if not pooled(function) and hasattr(function, "limit"):
                function.limit(timeout)
        others = {name: f for name, f in zip(self.names, self.functions, strict=True) if pooled(f)}
        count = workers_of(timeout, workers)
        self.pooled = Pooled(others, timeout, count, seed) if count and others else None

    @property
    def models(self) -> list[Judge]:
        """The functions that are models."""
        return [function for function in self.functions if isinstance(function, Judge)]

    def device(self, policy: torch.device, name: str = "auto") -> torch.device:
        """Find the device of the models."""
        if name == "auto":
            return policy
        if not self.models:
            raise ValueError(
                f"reward_device={name} has an effect only where a reward is a model; leave it out, or name a model in "
                "reward_funcs"
            )
        return choose_device(name, "reward_device")

    def place(self, device: torch.device, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Move reward models to a device."""
        for model in self.models:
            model.place(device, tokenizer)

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what the functions keep open: processes and connections. They open again where they are called again."""
        if self.pooled is not None:
            self.pooled.close()
        for function in self.functions:
            if not pooled(function) and hasattr(function, "close"):
                function.close()

    def begin(
        self,
        completions: Sequence[Completion],
        trainer_state: TrainerState | None = None,
        columns: Iterable[str] = (),
        key: int = 0,
    ) -> dict[str, list[Call]]:
        """Begin to judge completions in other processes, where there are any."""
        return {} if self.pooled is None else self.pooled.begin(key, completions, trainer_state, columns)

    def __call__(
        self,
        completions: Sequence[Completion],
        trainer_state: TrainerState | None = None,
        allow_none: bool = False,
        columns: Iterable[str] = (),
        begun: dict[str, list[Call]] | None = None,
    ) -> Judged:
        """Judge completions."""
        count = len(completions)
        notes = [Notes(count) for _ in self.functions]
        begun = self.begin(completions, trainer_state, columns) if begun is None else begun
        calls = [
            partial(_call, function, completions, trainer_state, own, columns)
            for name, function, own in zip(self.names, self.functions, notes, strict=True)
            if name not in begun
        ]
        named = zip(self.names, self.functions, strict=True)
        with slowness_told([name for name, function in named if pooled(function) and name not in begun]):
            here = iter(awaited([attempt(call) for call in calls]))
        results = [
            self.pooled.collect(begun[name], own) if name in begun else next(here)
            for name, own in zip(self.names, notes, strict=True)
        ]
        per_function, errors, timeouts = [], Counter(), Counter()
        logged, extras, owners, steps = defaultdict(list), {}, {}, {}
        for name, result, own in zip(self.names, results, notes, strict=True):
            verdicts = result
            if name not in begun and not isinstance(result, Failure):
                verdicts = attempt(partial(read_verdicts, result, count))
            for metric, values in own.metrics.items():
                logged[metric] += values
            for column, values in own.columns.items():
                if owners.setdefault(column, name) == name:
                    extras[column] = values
                elif not isinstance(verdicts, Failure):
                    verdicts = f"logs the column {column!r}, which {owners[column]!r} logs too; choose another name"
            if own.steps is not None and not isinstance(verdicts, Failure):
                steps[name], verdicts = own.steps, _beyond(own.steps, completions) or verdicts
            per_function.append(self._checked(name, verdicts, completions, errors, timeouts))
        per_function = torch.stack(per_function, 1)
        per_function[per_function[:, : self.judges].isnan().all(1), self.judges :] = math.nan
        by_name = [dict(zip(self.names, rewards, strict=True)) for rewards in per_function.tolist()]
        done = [
            dataclasses.replace(
                completion,
                rewards=verdicts,
                extras={column: values[i] for column, values in extras.items()},
                # Those of a function that gave no verdict do not count either.
                steps={
                    name: of[i] for name, of in steps.items() if of[i] is not None and not math.isnan(verdicts[name])
                },
            )
            for i, (completion, verdicts) in enumerate(zip(completions, by_name, strict=True))
        ]
        if not timeouts:  # what took too long says nothing of the rows
            if not errors:
                self._tell_silence(done)
            if not allow_none:
                self.refuse_none(done)
        return Judged(done, errors, dict(logged), timeouts)

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
        """Refuse completions of which none has a reward, unless failures are skipped."""
        if self.on_error == "raise" and reward_matrix(completions)[:, : self.judges].isnan().all():
            raise ValueError(
                f"all rewards are None: {', '.join(self.names[: self.judges])} gave none of {len(completions)} "
                "completions a reward; do the rows have the columns that the functions read?"
            )

    def _checked(self, name, verdicts, completions, errors, timeouts):
        """Return the rewards of one function, [S] fp64. `verdicts` are as `read_verdicts` gives them, or a failure."""
        count, first = len(completions), next(iter(completions), None)
        rewards = torch.full((count,), math.nan, dtype=torch.float64)
        if isinstance(verdicts, Failure):
            self._fail(name, _raised(verdicts, first), errors, count, first, verdicts.error)
        elif isinstance(verdicts, str):
            self._fail(name, verdicts, errors, count, first)
        else:
            for i, verdict in enumerate(verdicts):
                if isinstance(verdict, str):
                    self._fail(name, verdict, errors, 1, completions[i])
                elif isinstance(verdict, Failure):
                    self._fail(name, _raised(verdict, completions[i]), errors, 1, completions[i], verdict.error)
                elif verdict is TIMED_OUT:
                    timeouts[name] += 1
                elif verdict is not None:
                    rewards[i] = verdict
        return rewards

    def _fail(self, name, problem, errors, count, completion, cause=None):
        """Count `count` errors, or raise one and name its completion: the first one where a call failed as a whole."""
        if self.on_error == "skip":
            errors[name] += count
            return
        where = "" if count == 1 else f"in a call of {count} completions, the first of them "
        raise ValueError(
            f"reward function {name!r} {problem}; --reward_errors skip leaves such rewards out\n"
            f"  {where}on the prompt {shortened(completion.prompt.prompt)}, completion {shortened(completion.content)}"
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


def rewards_settings(config: Any) -> dict[str, Any]:
    """Read from settings how reward functions are called."""
    return {
        "on_error": config.reward_errors,
        "timeout": config.reward_timeout,
        "workers": config.reward_workers,
        "seed": config.seed,
    }


def _raised(failure, completion):
    """Say what a function raised, and what it could have read."""
    columns = ", ".join(completion.prompt.columns if completion else ()) or "(none)"
    return f"raised {failure}; the row has the columns {columns}"


def _beyond(steps, completions):
    """Say which steps of a function end after their completion, as a problem; None where none does."""
    for i, (of_one, completion) in enumerate(zip(steps, completions, strict=True)):
        if of_one and of_one[-1][0] > len(completion.rollout.ids):
            tokens = len(completion.rollout.ids)
            return f"logs a step that ends at {of_one[-1][0]} for completion {i}, which has {tokens} tokens"
    return None


def _call(function, completions, trainer_state, notes, columns):
    """Call a function with copies made for it alone."""
    given = {name: [copied(item) for item in items] for name, items in arguments(completions, columns).items()}
    logs = {name: getattr(notes, name) for name in LOGS}
    return function(**given | logs | {"trainer_state": copied(trainer_state)})
