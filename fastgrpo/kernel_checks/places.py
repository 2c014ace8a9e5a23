"""Where a check runs, and what it consists of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Place(NamedTuple):
    """Where and at which size a case runs.

    Attributes:
        mode: "gpu", "cpu" (the paths without Triton) or "interpreter" (the Triton kernels on a CPU).
        device: Where its tensors lie.
        dtype: Dtype of the operands.
        timed: Whether it runs at the size of the time, not at that of the values.
    """

    mode: str
    device: torch.device
    dtype: torch.dtype
    timed: bool

    def size(self, sizes: dict[str, tuple]) -> tuple[int, ...] | None:
        """Return the size of this place, or None where there is none."""
        return sizes[self.mode][self.timed]


class Trial(NamedTuple):
    """A case at one place.

    Attributes:
        ours: Calls the kernel.
        plain: Does the same in plain PyTorch, as people write it.
        judge: Takes what `ours` returned; returns each error with the largest one that is allowed, by name.
        flops: What the mathematics needs, where products bound the time; else 0.
        bytes: What must be read and written, where memory bounds the time; else 0.
    """

    ours: Callable[[], Any]
    plain: Callable[[], Any]
    judge: Callable[[Any], dict[str, tuple[float, float]]]
    flops: int = 0
    bytes: int = 0
