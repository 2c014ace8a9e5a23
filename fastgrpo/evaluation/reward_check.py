"""Finds problems of a reward function for GRPO, from its rewards of groups of completions.

GRPO learns from differences within a group. So rewards must differ in a group, must be reproducible, and must not
depend on other completions in the call or on their order.
"""

import inspect
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from fastgrpo.data.prompts import RESERVED, copied, shortened
from fastgrpo.data.records import Sample, TrainerState
from fastgrpo.rewards.answers import completion_text
from fastgrpo.rewards.call import Rewards, parameters_of, reward_matrix
from fastgrpo.rewards.guard import Failure, attempt, listed, plain
from fastgrpo.rewards.pool import DIED

LENGTH_CORRELATION = 0.7  # Spearman's correlation above which the reward prefers length
LENGTHS = 8  # fewest rewards for which a correlation is reported
ALONE = 64  # maximum number of completions judged alone
SLOW = 1.0  # milliseconds per completion


@dataclass
class Finding:
    """The findings for one reward function.

    Attributes:
        name: Its name.
        mean: Mean of the rewards.
        deviation: Standard deviation of the rewards.
        spread: Share of groups whose rewards differ.
        none: Completions with None that are not errors or timeouts.
        errors: Completions on which it failed.
        timeouts: Completions on which it timed out.
        milliseconds: Time per completion.
        best: Completion with the largest reward, and the reward; None without rewards.
        worst: Completion with the smallest reward, and the reward.
        warnings: Problems for GRPO, with the remedy.
    """

    name: str
    mean: float = math.nan
    deviation: float = math.nan
    spread: float = 0.0
    none: int = 0
    errors: int = 0
    timeouts: int = 0
    milliseconds: float = 0.0
    best: tuple[Sample, float] | None = None
    worst: tuple[Sample, float] | None = None
    warnings: list[str] = field(default_factory=list)


class _Watched:
    """A reward function that records its first exception, NaN, changed arguments, and the time of its last call."""

    def __init__(self, function: Callable, clock: Callable[[], float]):
        self.function, self.__name__ = function, getattr(function, "__name__", type(function).__name__)
        self.raised, self.nan, self.changed = None, False, set()
        self.clock, self.seconds = clock, 0.0

    def __call__(self, **given: Any) -> Any:
        before = {name: copied(values) for name, values in given.items() if isinstance(values, list)}
        started = self.clock()

        def after(result: Any) -> Any:
            values = listed(result, len(given["completions"]))  # this runs a generator
            self.seconds = self.clock() - started
            self.changed |= {name for name, values in before.items() if given[name] != values}
            for value in values or ():
                if isinstance(value, Failure):
                    self.raised = self.raised or str(value)
                read = plain(value)
                self.nan |= isinstance(read, float) and math.isnan(read)
            return result if values is None else values

        try:
            result = self.function(**given)
        except BaseException as error:
            self._raise(error)
        if not inspect.isawaitable(result):
            return after(result)

        async def wait() -> Any:
            try:
                return after(await result)
            except BaseException as error:
                self._raise(error)

        return wait()

    def _raise(self, error):
        self.raised = self.raised or str(Failure(error))
        raise error


def check_reward(
    function: Callable,
    groups: Sequence[Sequence[Sample]],
    state: TrainerState | None = None,
    clock: Callable[[], float] = time.perf_counter,
    timeout: float | None = None,
) -> Finding:
    """Judge groups of completions in several ways, and compare the rewards.

    Args:
        function: The reward function.
        groups: The completions of each prompt.
        state: The trainer_state of the function.
        clock: Returns the time in seconds.
        timeout: Limit in seconds per completion, or None. The function first runs in processes that can be killed; late
            completions are dropped from later checks.

    Returns:
        The findings.
    """
    groups, late, deaths = (groups, [], []) if timeout is None else _without_late(function, groups, state, timeout)
    completions = [completion for group in groups for completion in group]
    watched = _Watched(function, clock)
    if not completions:
        warnings = ([_told_late(late, timeout)] if late else []) + deaths[:1]
        return Finding(watched.__name__, timeouts=len(late), errors=len(deaths), warnings=warnings)
    rewards = Rewards(watched, on_error="skip")
    rewards.columns = _columns(completions)

    def judge(given: Sequence[Sample]) -> torch.Tensor:
        judged = rewards(given, state)
        errors.append(judged.errors.total())
        return reward_matrix(judged.completions)[:, 0]

    rewards(completions[:1], state)  # exclude one-time work, such as an import, from the time
    errors = []
    first = judge(completions)
    found = Finding(watched.__name__, milliseconds=1000 * watched.seconds / len(completions))
    found.none = int(first.isnan().sum()) - errors[0]
    found.errors, found.timeouts = errors[0], len(late)
    given = first[~first.isnan()]
    if len(given):
        found.mean, found.deviation = given.mean().item(), given.std(correction=0).item()
        ranked = [(completions[i], first[i].item()) for i in range(len(first)) if not first[i].isnan()]
        found.best, found.worst = max(ranked, key=lambda pair: pair[1]), min(ranked, key=lambda pair: pair[1])
    found.spread = _spread(first, groups)
    if late:
        found.warnings.append(_told_late(late, timeout))
    _tell_failures(found, watched, function, completions)
    found.errors += len(deaths)
    found.warnings += deaths[:1]
    _tell_values(found, first, groups, completions)
    _tell_dependence(found, first, judge, completions, groups, getattr(function, "group_wise", False))
    if watched.changed:
        names = ", ".join(sorted(watched.changed))
        found.warnings.append(f"It changes its arguments ({names}); copy them first, or TRL's trainer breaks.")
    if getattr(function, "pooled", True):
        pickled = attempt(lambda: ForkingPickler.dumps(function))
        if isinstance(pickled, Failure):
            found.warnings.append(
                f"It cannot be pickled, so --reward_workers cannot run it ({pickled.error}); define it at the "
                "top level of a module."
            )
        if found.milliseconds > SLOW:
            found.warnings.append(
                f"It takes {found.milliseconds:.1f} ms per completion; --reward_workers 4 judges in four processes."
            )
    return found


def _without_late(function, groups, state, timeout):
    """Judge in processes that can be killed. Return the groups without late and crashing completions."""
    late, deaths, kept = [], [], []
    try:
        rewards = Rewards(function, timeout=timeout)
    except ValueError as error:
        if "cannot be sent to another process" not in str(error):
            raise
        return groups, late, deaths  # it cannot be pickled; reported below
    rewards.columns = _columns([completion for group in groups for completion in group])
    with rewards:
        if rewards.pool is None:  # it has its own limit, set above
            return groups, late, deaths
        whole = getattr(function, "group_wise", False)
        parts = [[list(group)] if whole else [[completion] for completion in group] for group in groups]
        begun = [[rewards.begin(part, state, key=i) for part in own] for i, own in enumerate(parts)]
        for own, calls in zip(parts, begun, strict=True):
            group = []
            for part, call in zip(own, calls, strict=True):
                try:
                    judged = rewards(part, state, begun=call)
                except ValueError as error:  # exceptions occur again in the watched call
                    if DIED in str(error):
                        said = f"It ends its process on the completion {shortened(part[0].content)}."
                        deaths += [said] * len(part)
                    else:
                        group += part
                    continue
                (late if judged.timeouts.total() else group).extend(part)
            kept.append(group)
    return [group for group in kept if group], late, deaths


def _columns(completions):
    return dict.fromkeys(name for completion in completions for name in completion.columns)


def _told_late(late, timeout):
    return (
        f"It takes longer than {timeout:g} s for {len(late)} completions, the first "
        f"{shortened(late[0].content)}; train with --reward_timeout, or bound its work."
    )


def _spread(rewards, groups):
    """Return the share of groups in which two rewards differ."""
    differing, at = 0, 0
    for group in groups:
        own = rewards[at : at + len(group)]
        differing, at = differing + (own[~own.isnan()].unique().numel() > 1), at + len(group)
    return differing / max(len(groups), 1)


def _tell_failures(found, watched, function, completions):
    if watched.raised:
        found.warnings.append(f"It raises {watched.raised}; fix it, or pass --reward_errors skip.")
    elif found.errors and not watched.nan:
        found.warnings.append(
            f"It failed on {found.errors} completions: it must return a list with a finite number or None for each."
        )
    if watched.nan:
        found.warnings.append("It returns NaN, which ends a run; return None where there is no verdict.")
    missing = [name for name in _needed(function) if not any(name in c.columns for c in completions)]
    if missing:
        found.warnings.append(f"It needs the column {missing[0]!r}, which the rows do not have; add it to the data.")


def _needed(function) -> Iterable[str]:
    """Return the names of the columns that a function requires."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = parameters_of(function).values()
    return [p.name for p in given if p.kind in kinds and p.default is p.empty and p.name not in RESERVED]


def _tell_values(found, rewards, groups, completions):
    given = ~rewards.isnan()
    if not given.any():
        found.warnings.append("It gives no completion a reward, so nothing is learned from it.")
    elif rewards[given].unique().numel() == 1:
        found.warnings.append(
            f"It is constant ({found.mean:g}), so all advantages are 0; reward better completions more."
        )
    elif max(map(len, groups)) == 1:
        found.warnings.append(
            "Each prompt has one completion, so nothing shows whether it differs within a group; give the rows several "
            "completions, or generate them with --model DIR."
        )
    elif found.spread == 0:
        found.warnings.append(
            "It never differs within a group, so all advantages are 0; take rows of other difficulty, a model that "
            "sometimes succeeds, or more completions per prompt."
        )
    lengths = torch.tensor([len(completion_text(c.content)) for c in completions], dtype=torch.float64)
    correlation = rank_correlation(rewards[given], lengths[given]) if given.sum() >= LENGTHS else 0.0
    if correlation >= LENGTH_CORRELATION:
        found.warnings.append(
            f"It prefers long completions: its rank correlation with the length is {correlation:.2f} (reported above "
            f"{LENGTH_CORRELATION}); a policy will learn to write long texts, so bound the length."
        )


def rank_correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return Spearman's rank correlation; ties have their mean rank.

    Args:
        first: [S] numbers.
        second: [S] numbers.

    Returns:
        From -1 to 1; 0 if one of the two is constant.
    """

    def ranks(values: torch.Tensor) -> torch.Tensor:
        _, place, counts = values.unique(return_inverse=True, return_counts=True)
        return (counts.cumsum(0).double() - (counts - 1) / 2)[place]

    if first.unique().numel() < 2 or second.unique().numel() < 2:
        return 0.0
    return torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1].item()


def _tell_dependence(found, first, judge, completions, groups, group_wise):
    """Judge again, in another order, and one by one. Report only the first difference: it causes the others."""

    def differs(other: torch.Tensor, of: torch.Tensor = first) -> bool:
        return not torch.allclose(of, other, rtol=1e-4, atol=1e-6, equal_nan=True)

    if differs(judge(completions)):
        found.warnings.append("It is random: a second call gives other rewards; seed it from the completion.")
        return
    if len(completions) < 2:
        return
    if differs(judge(completions[::-1]).flip(0)):
        found.warnings.append(
            "It depends on the order of the completions; a reward must belong to its completion, so compute it only "
            "from that completion."
        )
        return
    parts = list(groups) if group_wise else [[completion] for completion in completions[:ALONE]]
    apart = torch.cat([judge(part) for part in parts if part])
    if differs(apart, first[: len(apart)]):
        remedy = (
            "compute it only from the group" if group_wise else
            "if it compares the completions of a prompt, set group_wise = True on it, so that the pool of "
            "--reward_workers gives it whole groups"
        )  # fmt: skip
        found.warnings.append(f"It depends on the other completions in the call; {remedy}.")
