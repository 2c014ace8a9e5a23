"""Calls reward functions as TRL does, and checks their results."""

import dataclasses
import hashlib
import inspect
import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from fastgrpo.config.sections import POOL_WORKERS
from fastgrpo.data.prompts import copied, shortened
from fastgrpo.data.records import Prompt, Sample, TrainerState, with_text
from fastgrpo.policy.device import choose_device
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rewards.guard import TIMED_OUT, Failure, attempt, awaited, cores, shown
from fastgrpo.rewards.pool import Given, Pool
from fastgrpo.rewards.values import LOGS, Logs, read_verdicts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastgrpo.rewards.models import Judge

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judged:
    """The verdicts of the reward functions on some completions."""

    completions: list[Sample]  # with `rewards`, `extras` and `steps` filled in
    errors: Counter  # number of completions on which each function failed
    logged: dict[str, list[float]]  # the values that functions passed to log_metric
    timeouts: Counter = field(default_factory=Counter)  # number of completions for which each function timed out


def reward_matrix(completions: Sequence[Sample]) -> torch.Tensor:
    """Return the rewards of completions, [S, F] fp64, NaN where a function returned None."""
    return torch.tensor([list(completion.rewards.values()) for completion in completions], dtype=torch.float64)


class Rewards:
    """Named reward functions and their weights.

    A function is called as `f(prompts=, completions=, completion_ids=, trainer_state=, log_metric=, log_extra=,
    log_steps=, **columns)` with one item per completion. It returns a list, tuple, generator, 1-d tensor or array, or
    pandas Series with one float or None per completion. It may be async.

    With tools, functions also get `environments`, and `tool_mask` with 1 for drawn tokens and 0 for answers of tools.
    `completions` are then lists of messages with roles.

    A function gets its own copies, so it may change them. It may use the global random generators, which are seeded and
    saved with the run. Afterwards the working directory and torch's gradient and inference modes are restored. Every
    exception is a failure of the function, except KeyboardInterrupt. Its name is its `__name__`; a second function of
    the same name is name_2.

    With a time limit or workers, functions run in other processes (`begin`), usually with one completion a call.
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
        if weights and len(weights) != len(functions):
            raise ValueError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions")
        self.judges = len(functions)
        self.functions = [*functions, *shaping]
        self.names = names_of(self.functions)
        weights = [*(weights or [1.0] * len(functions)), *[1.0] * len(shaping)]
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.on_error = on_error
        self.warned = False  # whether a completion without any reward was logged
        if timeout is not None and workers == 0:
            raise ValueError("reward_timeout needs processes that can be killed: leave reward_workers out, or raise it")
        for function in self.functions:
            if not pooled(function) and hasattr(function, "limit"):
                function.limit(timeout)
        others = {name: f for name, f in zip(self.names, self.functions, strict=True) if pooled(f)}
        if workers is None:
            workers = 0 if timeout is None else min(cores(), POOL_WORKERS)
        self.pooled = others if workers else {}  # the functions that run in other processes
        self.pool = Pool(self.pooled, workers) if self.pooled else None
        self.timeout, self.seed, self.sent_state = timeout, seed, None
        self.columns = ()  # columns of the data; a call in which no row has one gets None for each completion

    @property
    def models(self) -> "list[Judge]":
        """The functions that are reward models."""
        return [function for function in self.functions if hasattr(function, "place")]

    def device(self, policy: torch.device, name: str = "auto") -> torch.device:
        """Find the device of the models."""
        if name == "auto":
            return policy
        if not self.models:
            raise ValueError(
                f"device={name} of reward_model_kwargs has an effect only if a reward is a model; "
                "leave it out, or name a model in reward_funcs"
            )
        return choose_device(name, "device of reward_model_kwargs")

    def place(self, device: torch.device, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        """Move reward models to a device."""
        for model in self.models:
            model.place(device, tokenizer)

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the processes and connections of the functions. A later call opens them again."""
        if self.pool is not None:
            self.pool.close()
        for function in self.functions:
            if not pooled(function) and hasattr(function, "close"):
                function.close()

    def begin(
        self,
        completions: Sequence[Sample],
        trainer_state: TrainerState | None = None,
        columns: Iterable[str] = (),
        key: int = 0,
    ) -> dict[str, list[tuple[int, Future]]]:
        """Start to judge completions in other processes. Return calls and their numbers of completions by function.

        A plain function gets one completion per call, so the limit holds per completion. With the attribute
        `group_wise = True`, it gets all in one call, with a multiple of the limit. Calls of an async function run
        concurrently. The seed of a call depends on its position in the run, not on the process.
        """
        if self.pool is None:
            return {}
        state = step = None
        if trainer_state is not None:  # a plain object: workers can unpickle it without modules of the project
            given = vars(trainer_state)
            state = {name: list(v) if name == "log_history" else deepcopy(v) for name, v in given.items()}
            state, step = SimpleNamespace(**state), trainer_state.global_step
        if self.sent_state != state:  # an evaluation changes the state between two steps, too
            self.pool.tell(state)
            self.sent_state = state
        columns, calls = (*self.columns, *columns), {}
        for name, function in self.pooled.items():
            plain = _innermost(function)
            together = inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(type(plain).__call__)
            size = len(completions) if getattr(function, "group_wise", False) else 1
            parts = [completions[i : i + size] for i in range(0, len(completions), size)]
            given = [Given(arguments(part, columns), LOGS, len(part)) for part in parts]
            limit, results = None if self.timeout is None else self.timeout * size, []
            for start in [0] if together else range(len(given)):
                place = repr((self.seed, step, key, start, name))
                seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8])
                job = given if together else given[start : start + 1]
                results += self.pool.submit(name, job, seed, limit, together)
            calls[name] = [(one.count, result) for one, result in zip(given, results, strict=True)]
        return calls

    def __call__(
        self,
        completions: Sequence[Sample],
        trainer_state: TrainerState | None = None,
        columns: Iterable[str] = (),
        begun: dict[str, list[tuple[int, Future]]] | None = None,
    ) -> Judged:
        """Judge completions."""
        count, logs = len(completions), {name: Logs(len(completions)) for name in self.names}
        columns = (*self.columns, *columns)
        begun = self.begin(completions, trainer_state, columns) if begun is None else begun
        here = {name: f for name, f in zip(self.names, self.functions, strict=True) if name not in begun}
        calls = [partial(_call, f, completions, trainer_state, logs[name], columns) for name, f in here.items()]
        results = dict(zip(here, awaited([attempt(call) for call in calls]), strict=True))
        for name, result in results.items():
            if not isinstance(result, Failure):
                results[name] = attempt(partial(read_verdicts, result, count))
        results |= {name: _collect(calls, logs[name]) for name, calls in begun.items()}
        per_function, errors, timeouts = [], Counter(), Counter()
        logged, extras, owners, steps = defaultdict(list), {}, {}, {}
        for name in self.names:
            verdicts, own = results[name], logs[name]
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
            completion.replace(
                rewards=verdicts,
                extras={column: values[i] for column, values in extras.items()},
                # Steps of a function that returned None are dropped too.
                steps={
                    name: of[i] for name, of in steps.items() if of[i] is not None and not math.isnan(verdicts[name])
                },
            )
            for i, (completion, verdicts) in enumerate(zip(completions, by_name, strict=True))
        ]
        if not timeouts and not errors:  # after a failure, the rows may be right
            self._warn_unjudged(done)
        return Judged(done, errors, dict(logged), timeouts)

    def _warn_unjudged(self, completions):
        """Warn once about a completion without any reward."""
        unjudged = next((c for c in completions if all(map(math.isnan, c.rewards.values()))), None)
        if unjudged is not None and not self.warned:
            self.warned = True
            logger.warning(
                "All reward functions returned None for the following kwargs: prompt %s, columns %s. Such completions "
                "have an advantage of 0. Do the rows have the columns that the functions read?",
                shortened(unjudged.prompt),
                ", ".join(unjudged.columns) or "none",
            )

    def _checked(self, name, verdicts, completions, errors, timeouts):
        """Return the rewards of one function, [S] fp64. `verdicts` come from `read_verdicts`, or are a failure."""
        rewards = torch.full((len(completions),), math.nan, dtype=torch.float64)
        if isinstance(verdicts, (str, Failure)):
            self._fail(name, verdicts, completions, errors)
            return rewards
        for i, verdict in enumerate(verdicts):
            if isinstance(verdict, (str, Failure)):
                self._fail(name, verdict, completions[i : i + 1], errors)
            elif verdict is TIMED_OUT:
                timeouts[name] += 1
            elif verdict is not None:
                rewards[i] = verdict
        return rewards

    def _fail(self, name, problem, completions, errors):
        """Count a failed call for its completions, or raise it and name the first one."""
        if self.on_error == "skip":
            errors[name] += len(completions)
            return
        first, cause = completions[0], None
        if isinstance(problem, Failure):
            columns = ", ".join(first.columns) or "(none)"
            problem, cause = f"raised {problem}; the row has the columns {columns}", problem.error
        where = "" if len(completions) == 1 else f"in a call of {len(completions)} completions, the first of them "
        raise ValueError(
            f"reward function {name!r} {problem}; --reward_errors skip leaves such rewards out\n"
            f"  {where}on the prompt {shortened(first.prompt)}, completion {shortened(first.content)}"
        ) from cause

    def total(self, per_function: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the rewards that are not NaN: [S, F] to [S] fp64, NaN where all are."""
        total = (per_function * self.weights).nansum(1)
        return torch.where(per_function.isnan().all(1), math.nan, total)


def rewards_settings(config: Any, own: int = 0) -> dict[str, Any]:
    """Return the arguments of `Rewards` from settings. The last `own` functions have the weight 1."""
    return {
        "weights": config.reward_weights and (*config.reward_weights, *[1.0] * own),
        "on_error": config.reward_errors,
        "timeout": config.reward_timeout,
        "workers": config.reward_workers,
        "seed": config.seed,
    }


def _beyond(steps, completions):
    """Describe steps that end after their completion, or return None."""
    for i, (of_one, completion) in enumerate(zip(steps, completions, strict=True)):
        if of_one and of_one[-1][0] > len(completion.ids):
            tokens = len(completion.ids)
            return f"logs a step that ends at {of_one[-1][0]} for completion {i}, which has {tokens} tokens"
    return None


def _call(function, completions, trainer_state, notes, columns):
    """Call a function with its own copies."""
    given = arguments(completions, columns)  # with a new list of each completion's ids
    given |= {name: [copied(item) for item in items] for name, items in given.items() if name != "completion_ids"}
    if any(completion.dialogue for completion in completions):
        given["environments"] = [completion.dialogue.environment for completion in completions]
    logs = {name: getattr(notes, name) for name in LOGS}
    return function(**given | logs | {"trainer_state": copied(trainer_state)})


def check_function(function: Any) -> None:
    """Raise ValueError for an object that is not a reward function."""
    if isinstance(function, type) or hasattr(function, "from_pretrained") or not callable(function):
        raise ValueError(
            f"reward_funcs: {shown(function)} of type {type(function).__name__} is not a function; pass a function "
            "f(prompts, completions, **columns), an object that can be called like it, or a list of them; "
            "fastgrpo.rewards.find_reward finds a function, a model or a server by its name, and "
            "fastgrpo.rewards.models.RewardModel makes a function of a model"
        )
    parameters = parameters_of(function).values()
    if parameters and not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"reward function {name!r} takes ({', '.join(map(str, parameters))}), and is called with prompts, "
            f"completions, completion_ids, every column of the rows and more, all by name; write "
            f"{name}(completions, **columns), with the columns that it reads named before **columns"
        )


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none if it has no signature, like some C callables."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def names_of(functions: Sequence[Callable]) -> list[str]:
    """Name each function; number those that share a name."""
    names = []
    for function in map(_innermost, functions):
        name = getattr(function, "__name__", type(function).__name__)
        free = (name if i == 1 else f"{name}_{i}" for i in itertools.count(1))
        names.append(next(candidate for candidate in free if candidate not in names))
    return names


def _innermost(function):
    """Unwrap functools.partial."""
    return _innermost(function.func) if isinstance(function, partial) else function


def pooled(function: Callable) -> bool:
    """Return whether a pool may run a function.

    One with its own model or processes has `pooled = False`. Environments are in this process, so a function that names
    them runs here too.
    """
    return getattr(function, "pooled", True) and "environments" not in parameters_of(function)


def arguments(completions: Sequence[Sample], columns: Iterable[str]) -> dict[str, list]:
    """Return the arguments of a call that have one item per completion."""
    names = dict.fromkeys([*columns, *(name for completion in completions for name in completion.columns)])
    given = {name: [completion.columns.get(name) for completion in completions] for name in names}
    if any(completion.dialogue for completion in completions):
        given["tool_mask"] = [completion.tool_mask or [1] * len(completion.ids) for completion in completions]
    return given | {
        "prompts": [completion.prompt for completion in completions],
        "completions": [completion.content for completion in completions],
        "completion_ids": [list(completion.ids) for completion in completions],
    }


def _collect(calls, notes):
    """Wait for the calls of one function in other processes."""
    verdicts = []
    for count, result in calls:
        own, outcome = Logs(count), result.result()
        if outcome is not TIMED_OUT and not isinstance(outcome, Failure):
            outcome = attempt(partial(_read, outcome, own, count))
        notes.take(own, len(verdicts))
        verdicts += outcome if isinstance(outcome, list) else [outcome] * count
    return verdicts


def _read(outcome, notes, count):
    """Read the result and the logs of a call. Raises ValueError for logs that cannot be written."""
    result, logged = outcome
    for name, args, named in logged:
        getattr(notes, name)(*args, **named)
    return read_verdicts(result, count)


class Judging:
    """Judges groups of completions as they finish, and gathers the results of all ranks.

    A reward function in this process gets the completions of its own rank in one call. A function in another process
    gets each group as soon as it is added, even before the training step of the group. It gets `step`, the number of
    that training step, as `global_step`; None means the current step.
    """

    def __init__(
        self,
        rewards: Rewards,
        prompts: Sequence[Prompt],
        tokenizer: "PreTrainedTokenizerBase",
        trainer_state: TrainerState | None = None,
        ranks: Ranks = ALONE,
        step: int | None = None,
    ):
        self.rewards, self.prompts, self.tokenizer = rewards, prompts, tokenizer
        self.state, self.ranks, self.step = trainer_state, ranks, step
        self.columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns)  # those of all ranks
        self.groups, self.begun = {}, {}

    def add(self, i: int, rollouts: Sequence[Sample]) -> None:
        """Add the group that this rank drew for a prompt, and start to judge it."""
        self.groups[i] = group = [with_text(rollout, self.prompts[i], self.tokenizer) for rollout in rollouts]
        state = self.state if self.step is None else dataclasses.replace(self.state, global_step=self.step)
        self.begun[i] = self.rewards.begin(group, state, self.columns, i)

    def result(self) -> Judged:
        """Wait for the rewards, and gather those of all ranks."""
        mine, begun = sorted(self.groups), defaultdict(list)
        completions = [completion for i in mine for completion in self.groups[i]]
        for i in mine:
            for name, calls in self.begun[i].items():
                begun[name] += calls
        judged = Judged([], Counter(), {})
        if completions:
            judged = self.rewards(completions, self.state, self.columns, begun)
        if self.ranks.size == 1:
            return judged
        owners = [i for i in mine for _ in self.groups[i]]
        sent = [
            (i, _sent(completion, self.prompts[i])) for i, completion in zip(owners, judged.completions, strict=True)
        ]
        sent = dataclasses.replace(judged, completions=sent)
        judged, completions = joined(self.ranks.gather(sent, "the completions that the ranks drew")), []
        for i, sample in sorted(judged.completions, key=lambda pair: pair[0]):
            given = self.prompts[i]
            if sample.prompt_ids is None:
                sample = sample.replace(prompt_ids=given.ids, prompt=given.prompt)
            completions.append(sample.replace(columns=given.columns))
        return dataclasses.replace(judged, completions=completions)


def joined(parts: Sequence[Judged]) -> Judged:
    """Join verdicts in order."""
    logged = defaultdict(list)
    for part in parts:
        for name, values in part.logged.items():
            logged[name] += values
    errors, timeouts = (sum((getattr(part, name) for part in parts), Counter()) for name in ("errors", "timeouts"))
    return Judged([*itertools.chain.from_iterable(part.completions for part in parts)], errors, dict(logged), timeouts)


def judge_together(
    rewards: Rewards,
    drawn: Mapping[int, Sequence[Sample]],
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    trainer_state: TrainerState | None = None,
    *,
    ranks: Ranks = ALONE,
) -> Judged:
    """Judge the completions of this rank, and gather those of all ranks."""
    judging = Judging(rewards, prompts, tokenizer, trainer_state, ranks)
    for i, rollouts in drawn.items():
        judging.add(i, rollouts)
    return judging.result()


def _sent(completion, prompt):
    """Return a completion without fields that all ranks have, with its own tensors: pickle sends a view's storage."""
    own = {"logps": completion.logps.clone(), "sampler_logps": completion.sampler_logps.clone(), "columns": None}
    # An environment or `rollout_func` may have written another prompt.
    if (completion.prompt_ids, completion.prompt) == (prompt.ids, prompt.prompt):
        own |= {"prompt_ids": None, "prompt": None}
    return completion.replace(**own)
