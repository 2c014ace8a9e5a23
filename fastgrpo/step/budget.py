"""The parts of a run's memory, and whether they fit into a device."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

PROMPT_TOKENS = 256  # the length of a typical prompt
# The times of a step at which most memory is held. What comes and goes is there at some of them.
TIMES = {
    "draw": "while completions are drawn",
    "reference": "while the reference computes log-probs",
    "head": "while the loss computes logits",
    "layers": "while the layers go backward",
}


@dataclass(frozen=True)
class Part:
    """One part of a run's memory.

    Attributes:
        name: What the memory is for.
        bytes: How much memory the part takes, in bytes.
        how: How the bytes come about, as a text for people, such as "64 parameters x 2 bytes".
        ppo: Whether only PPO needs the part. Such parts are there to be compared with.
        times: The `TIMES` at which the part is there, if it comes and goes within a step. Empty if it is always there.
        at_most: Whether the bytes are a bound that the run may stay far below, so that it is not refused for them.
        saved_by: Flags that would make the part smaller, each with the bytes that it would save.
        early: Whether a part that comes and goes is there already when keys and values get their memory.
    """

    name: str
    bytes: int
    how: str
    ppo: bool = False
    times: tuple[str, ...] = ()
    at_most: bool = False
    saved_by: Mapping[str, int] = field(default_factory=dict)
    early: bool = False


@dataclass(frozen=True)
class Plan:
    """A run's memory beside the device that it is for.

    Attributes:
        parts: The parts, without keys and values.
        slots: Keys and values, as many as the rollouts want and may have.
        one_group: Bytes of keys and values without which there is no rollout.
        share: The share that keys and values may take of what the parts leave.
        room: Bytes of the device that the run may take; infinite where they are not known.
        checkpointing: Whether layers are computed again in the backward pass.
        why: Why this is so, as a text for people.
        ranks: How many processes share the run, each with a device of its own.
        parallel: How they share it, ddp or fsdp2.
        chosen: Why this is so, as a text for people; empty where nothing was chosen.
        instead: Bytes without which there is no step, under ways to start the run that are no single part's flag.
    """

    parts: list[Part]
    slots: Part
    one_group: int
    share: float
    room: float
    checkpointing: bool
    why: str
    ranks: int = 1
    parallel: str = "ddp"
    chosen: str = ""
    instead: Mapping[str, int] = field(default_factory=dict)

    @property
    def needed(self) -> int:
        """Bytes of the run with all keys and values that the rollouts want and may have."""
        return self.fixed + self.slots.bytes

    @property
    def fixed(self) -> int:
        """Bytes of all parts but keys and values, at the time at which they are most."""
        return self._most()[1]

    @property
    def passing(self) -> int:
        """Bytes of what comes and goes after keys and values have their memory, at the time at which it is most."""
        return self.fixed - sum(part.bytes for part in self.parts if not part.ppo and (part.early or not part.times))

    @property
    def least(self) -> int:
        """Bytes without which there is no step."""
        return self._least()

    @property
    def fits(self) -> bool:
        """Whether there is room for a step."""
        return self.least <= self.room

    def _there(self, time, certain=False):
        """List the parts that are there at a time: all of them, or those of which it is certain how large they are."""
        parts = (part for part in self.parts if not part.ppo and (not part.times or time in part.times))
        return [part for part in parts if not (certain and part.at_most)]

    def _most(self, flag=None, certain=False):
        """Return the time at which the parts are most, and their bytes then, less what a flag would save."""

        def held(time):
            return sum(part.bytes - part.saved_by.get(flag, 0) for part in self._there(time, certain))

        time = max(TIMES, key=held)
        return time, held(time)

    def _least(self, flag=None):
        """Count the bytes without which there is no step: the share of keys and values must hold one group."""
        return self._most(flag, certain=True)[1] + self._for_one_group - self.slots.saved_by.get(flag, 0)

    @property
    def _for_one_group(self):
        return math.ceil(self.one_group / self.share)

    def rows(self) -> list[tuple[str, str]]:
        """List the plan for a table."""
        rows = []
        for part in [*self.parts, self.slots]:
            when = f", {TIMES[part.times[0]]}" if len(part.times) == 1 else ""
            if not part.ppo:
                rows.append((part.name, f"{gib(part.bytes):>11}   {part.how}{when}"))
        about = f"the most at once, {TIMES[self._most()[0]]}" if self.passing else ""
        if not math.isinf(self.room):
            about += f"; of the {gib(self.room)} that the run may take"
        recompute = "on" if self.checkpointing else "off"
        rows += [("in all", f"{gib(self.needed):>11}   {about}".rstrip()),
                 ("gradient checkpointing", f"{recompute:>11}   {self.why}")]  # fmt: skip
        return rows + [("parallel", f"{self.parallel:>11}   {self.chosen}")] * (self.ranks > 1)

    def check(self) -> None:
        """Refuse a run that does not fit."""
        if self.fits:
            return
        time, _ = self._most(certain=True)
        there = sorted((part for part in self._there(time, certain=True) if part.bytes), key=lambda part: -part.bytes)
        parts = ", ".join(f"{part.name} {gib(part.bytes)}" for part in there)
        group = f"keys and values of one group {gib(self.one_group)}"
        if self.share < 1:
            group = (
                f"{gib(self._for_one_group)} for one group's keys and values of {gib(self.one_group)}, as keys and "
                f"values may take {self.share:g} of what the parts leave"
            )
        flags = {flag for part in [*self.parts, self.slots] for flag in part.saved_by}
        left = {flag: self._least(flag) for flag in sorted(flags)} | dict(self.instead)
        saved = Counter({flag: self.least - bytes for flag, bytes in left.items()})
        remedies = [
            f"{flag} saves {gib(count)}" + (", which is enough" if left[flag] <= self.room else "")
            for flag, count in saved.most_common()
            if count >= self.least / 100
        ]
        larger = "take a smaller model or a larger GPU"
        remedy = "; ".join(remedies) or larger
        for part in self.parts:
            if part.early and part.bytes > self.room:
                remedy = f"each of any number of devices holds the {part.name}, {gib(part.bytes)}: {larger}"
        each = f"each of {self.ranks} processes" if self.ranks > 1 else "the run"
        raise ValueError(
            f"{each} needs at least {gib(self.least)} of memory {TIMES[time]}, and there are {gib(self.room)}: "
            f"{parts}, and {group}\n  {remedy}"
        )


def gib(count: float) -> str:
    """Write a number of bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 2**10:.2f} KiB"
