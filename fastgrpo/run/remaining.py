"""How long a run will still take, from how long its parts took.

    time left = steps to come * seconds of a step + evaluations to come * seconds of one + checkpoints to come * ...

The seconds of a step are the mean of the recent steps. The first two steps of a process count only as long as there are
no others, because they compile kernels and fill caches. Where the recent steps clearly became longer or shorter, as
completions do, the end of a straight line through them counts more than their mean. An evaluation and a checkpoint cost
what the last one cost, and count once there was one.
"""

from collections import deque
from typing import Any

RECENT = 20  # steps that the seconds of a step are a mean over
CLEAR = 2.0  # standard errors of the slope of that line that are noise
WARMUP = 2  # steps of a process that are slower than the others
ENOUGH = 5  # steps after which those of the process that the run was resumed from are forgotten


class Remaining:
    """Estimates the seconds that a run will still take."""

    def __init__(self, total: int, done: int = 0, every: dict[str, int | None] | None = None) -> None:
        self.total, self.done, self.every = total, done, every or {}
        self.first, self.steps, self.before = [], deque(maxlen=RECENT), []
        self.costs, self.last = {}, dict.fromkeys(self.every, done)

    def step(self, seconds: float, count: int = 1) -> None:
        """Note how long a step took, or several of them together."""
        for _ in range(count):
            (self.first if len(self.first) < WARMUP else self.steps).append(seconds / count)
        self.done += count

    def interrupted(self, kind: str, seconds: float) -> None:
        """Note how long an interruption took that came after the step before."""
        self.costs[kind], self.last[kind] = seconds, self.done

    def seconds(self) -> float | None:
        """Estimate the seconds from now to the end of the run."""
        seen = self._seen() or self.first[-1:]
        if not seen:
            return None
        left = self.total - self.done
        others = sum(cost * self._to_come(kind) for kind, cost in self.costs.items())
        return left * _of_a_step(seen) + others

    def _seen(self):
        """Return the seconds of the recent steps, those of the process before among them while there are few others."""
        return [*(self.before if len(self.steps) < ENOUGH else ()), *self.steps]

    def _to_come(self, kind):
        """Count the interruptions to come of a kind: at the multiples of `every`, and after the last step."""
        every, last = self.every.get(kind), self.last.get(kind, self.done)
        if last >= self.total:
            return 0
        return 1 + ((self.total - 1) // every - last // every if every else 0)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run should know, as JSON can hold it: the seconds of recent steps and interruptions."""
        return {"steps": [round(seconds, 4) for seconds in self._seen()[-RECENT:]], "costs": dict(self.costs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin with what another process measured, which counts until there are enough steps of this one."""
        self.before, self.costs = list(state.get("steps", ())), dict(state.get("costs", ()))


def _of_a_step(seen):
    """Estimate the seconds of a step to come from those that were seen, in their order."""
    count, mean = len(seen), sum(seen) / len(seen)
    if count < ENOUGH:
        return mean
    places = [place - (count - 1) / 2 for place in range(count)]
    spread = sum(place * place for place in places)
    slope = sum(place * seconds for place, seconds in zip(places, seen, strict=True)) / spread
    rest = sum((seconds - mean - slope * place) ** 2 for place, seconds in zip(places, seen, strict=True))
    # The slope counts by how far it stands out of the noise, so that no threshold makes the estimate jump.
    doubt = CLEAR**2 * rest / (count - 2) / spread
    return mean + slope * places[-1] * max(0.0, 1 - doubt / slope**2) if slope else mean


def duration(seconds: float) -> str:
    """Write a time as a person reads it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
