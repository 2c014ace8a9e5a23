"""Work that ranks do together, each its part, in a thread beside all else that they exchange: writing a checkpoint."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from fastgrpo.ranks.group import Ranks

Result = TypeVar("Result")


def apart(ranks: Ranks, name: str, timeout: float) -> Ranks:
    """Return the same ranks with a group of their own, by which a thread exchanges things beside the main one.

    All ranks must call this, in the main thread.

    Args:
        ranks: The ranks.
        name: What the thread does.
        timeout: Seconds that a rank waits for the others in an exchange.

    Returns:
        The ranks; themselves where there is one process alone.
    """
    if ranks.size == 1:
        return ranks
    group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
    other = Ranks(ranks.rank, ranks.size, ranks.local_rank, group)
    other.notes = ranks.notes.apart(name)
    return other


def together(ranks: Ranks, do: Callable[[], Result], what: str) -> list[Result]:
    """Let every rank do its part of something. What fails on one rank fails on all of them.

    Args:
        ranks: The ranks.
        do: The part of this rank. It exchanges nothing with other ranks, and returns what can be pickled.
        what: What they do, as `Ranks.waiting` takes it.

    Returns:
        What each rank's part returned, in the order of the ranks.

    Raises:
        ValueError: At least one part failed. The error, the same on all ranks, says why each of them did. Where there
            is one process alone, its own error is raised instead.
        RankLost: Another rank did not come.
    """
    if ranks.size == 1:
        return [do()]
    result = failure = None
    try:
        result = do()
    except Exception as error:
        failure = f"{error}" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
    told = ranks.gather((result, failure), what)
    failed = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(told) if failure is not None]
    if failed:
        alike = len(failed) == ranks.size and len({failure for _, failure in told}) == 1
        raise ValueError(told[0][1] if alike else "; ".join(failed))
    return [result for result, _ in told]
