"""The parts of a run's memory, and whether they fit into a device."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

PROMPT_TOKENS = 256  # the length of a typical prompt


@dataclass(frozen=True)
class Part:
    """One part of a run's memory.

    Attributes:
        name: What the memory is for.
        bytes: How much memory the part takes, in bytes.
        how: How the bytes come about, as a text for people, such as "64 parameters x 2 bytes".
        ppo: Whether only PPO needs the part. Such parts are there to be compared with.
        passing: Whether the part comes and goes within a step. When a rollout begins it is not there.
        saved_by: Flags that would make the part smaller, each with the bytes that it would save.
    """

    name: str
    bytes: int
    how: str
    ppo: bool = False
    passing: bool = False
    saved_by: Mapping[str, int] = field(default_factory=dict)


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
    """

    parts: list[Part]
    slots: Part
    one_group: int
    share: float
    room: float
    checkpointing: bool
    why: str

    @property
    def needed(self) -> int:
        """Bytes of the run with all keys and values that the rollouts want and may have."""
        return self._fixed + self.slots.bytes

    @property
    def passing(self) -> int:
        """Bytes that come and go within a step, beside the gradients and the optimizer's states."""
        return sum(part.bytes for part in self.parts if part.passing)

    @property
    def _fixed(self):
        return sum(part.bytes for part in self.parts if not part.ppo)

    @property
    def _least(self):
        """Bytes without which the run cannot make a step: the share of keys and values must hold one group."""
        return self._fixed + math.ceil(self.one_group / self.share)

    def rows(self) -> list[tuple[str, str]]:
        """List the plan for a table.

        Returns:
            Pairs of a name and what there is to say of it, the sum and the choice of gradient checkpointing at the end.
        """
        rows = [
            (part.name, f"{gib(part.bytes):>11}   {part.how}") for part in [*self.parts, self.slots] if not part.ppo
        ]
        room = "" if math.isinf(self.room) else f"of the {gib(self.room)} that the run may take"
        recompute = "on" if self.checkpointing else "off"
        return [*rows, ("in all", f"{gib(self.needed):>11}   {room}".rstrip()),
                ("gradient checkpointing", f"{recompute:>11}   {self.why}")]  # fmt: skip

    def check(self) -> None:
        """Refuse a run that does not fit.

        Raises:
            ValueError: It does not; the parts are listed, and the flags that would help.
        """
        if self._least <= self.room:
            return
        largest = sorted((part for part in self.parts if part.bytes and not part.ppo), key=lambda part: -part.bytes)
        parts = ", ".join(f"{part.name} {gib(part.bytes)}" for part in largest)
        saved = Counter()
        for part in [*self.parts, self.slots]:
            saved.update(part.saved_by)
        flags = [
            f"{flag} saves {gib(count)}" + (", which is enough" if self._least - count <= self.room else "")
            for flag, count in saved.most_common()
            if count >= self._least / 100
        ]
        remedy = "; ".join(flags) or "take a smaller model or a larger GPU"
        raise ValueError(
            f"the run needs at least {gib(self._least)} of memory, and there are {gib(self.room)}: {parts}, and "
            f"{gib(self._least - self._fixed)} of which keys and values get the share {self.share:g}\n  {remedy}"
        )


def gib(count: float) -> str:
    """Write a number of bytes.

    Args:
        count: Bytes.

    Returns:
        The number with its unit, such as "1.84 GiB".
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 2**10:.2f} KiB"
