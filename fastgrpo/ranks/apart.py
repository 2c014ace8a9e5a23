"""Work that ranks do together, each its part, in a thread beside all else that they exchange: writing a checkpoint."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from fastgrpo.ranks.group import RankLost, Ranks

Result = TypeVar("Result")


def apart(ranks: Ranks, name: str, timeout: float) -> Ranks:
    """Return the same ranks with a group of their own, by which a thread exchanges things beside the main one.

    All ranks must call this, in the main thread.
    """
    if ranks.size == 1:
        return ranks
    with ranks.waiting(f"the group for the {name}"):
        group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
    other = Ranks(ranks.rank, ranks.size, group)
    other.notes = ranks.notes.apart(name)
    return other


def together(ranks: Ranks, do: Callable[[], Result], what: str) -> list[Result]:
    """Let every rank do its part of something. What fails on one rank fails on all of them."""
    if ranks.size == 1:
        return [do()]
    result = failure = mine = None
    try:
        result = do()
    except (ValueError, OSError) as error:
        mine, failure = error, (f"{error}", False)
    except Exception as error:
        mine, failure = error, (f"{type(error).__name__}: {error}", True)
    told = ranks.gather((result, failure), what)
    failures = {rank: failure for rank, (_, failure) in enumerate(told) if failure is not None}
    if any(mistaken for _, mistaken in failures.values()):
        if mine is not None:
            raise mine
        named = "; ".join(f"rank {rank} failed: {text}" for rank, (text, _) in failures.items())
        raise RankLost(f"rank {ranks.rank} stops after {what}: {named}")
    if failures:
        alike = len(failures) == ranks.size and len(set(failures.values())) == 1
        texts = [f"rank {rank}: {text}" for rank, (text, _) in failures.items()]
        raise ValueError(failures[0][0] if alike else "; ".join(texts)) from mine
    return [result for result, _ in told]
