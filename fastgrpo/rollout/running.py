"""What runs on the lanes, on the host: groups of completions, and the completion on each lane."""

from dataclasses import dataclass, field

from fastgrpo.data.records import Rollout
from fastgrpo.rollout.backend import Request


@dataclass(eq=False)
class Group:
    """A request that runs.

    Attributes:
        request: The request.
        slot: The slot of its prompt.
        lanes: The lane on which each of its completions began.
        done: Its finished completions, by their number within the group.
    """

    request: Request
    slot: int
    lanes: list[int]
    done: dict[int, Rollout] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Running:
    """A completion in flight.

    Attributes:
        group: Its group.
        number: Its number within the group.
        end: The decode step after which it has reached its limit, if each step from now on draws one token of it.
    """

    group: Group
    number: int
    end: int

    def drawn(self, steps: int) -> int:
        """Count its tokens."""
        return self.group.request.limits[self.number] - (self.end - steps)
