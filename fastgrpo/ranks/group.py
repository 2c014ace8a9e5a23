"""What the ranks of a run tell each other: objects, decisions and sums of tensors.

Every exchange has a name. Each rank notes in a store what it is about to do, so that when an exchange fails or takes
too long, those who waited can say for what, and which rank did not come.
"""

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fastgrpo.ranks.notes import Notes, fate, in_a_line

BUCKET = 1 << 28  # bytes that are summed at once, as a copy


class RankLost(RuntimeError):
    """Another rank failed, or did not come to an exchange in time."""

    def __init__(self, text: str, hung: bool = False) -> None:
        super().__init__(text)
        self.hung = hung


class Ranks:
    """The ranks of a run, as one of them sees it.

    Every method that exchanges something must be called by all ranks, in the same order.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: "dist.ProcessGroup | None" = None,
        store: "dist.Store | None" = None,
    ) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.store, self.notes = store, Notes(store, rank, size)
        self._inside = []  # what the open contexts wait for

    @property
    def lead(self) -> bool:
        """Whether this is rank 0, which writes the files of the run and speaks to the user."""
        return self.rank == 0

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name what this rank waits for, while the context manager is open. Contexts may lie in one another."""
        if self.size == 1:
            yield
            return
        self._inside.append(what)
        what = " in ".join(reversed(self._inside))
        self.notes.enter(what)
        try:
            yield
        except RankLost:  # of a context inside this one
            raise
        except RuntimeError as error:
            if not _is_of_a_connection(error):
                raise
            raise self._lost(error) from error
        finally:
            self._inside.pop()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Note an exception that leaves the context manager as this rank's failure, before anything else is done."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, RankLost):
                self.notes.fail(in_a_line(error))
            raise

    def stopped(self, cause: str, hung: bool = False) -> RankLost:
        """Make the error of a rank that cannot go on without another one."""
        what = " in ".join(reversed(self._inside))
        waits = f" while it waits for {what}" if what else ""
        return RankLost(f"rank {self.rank} stops{waits}: {cause}", hung)

    def _lost(self, error):
        """Make the error that says which ranks did not come to an exchange, and why as far as it is known."""
        outlive_sigterm()
        self.notes.lose()
        late = re.search("timed out|timeout", str(error), re.IGNORECASE) is not None
        missing = self.notes.missing(late)
        told = [fate(rank, place, late) for rank, place in (missing or {}).items()]
        if missing is None:
            told = [f"{str(error).splitlines()[0]}; what the ranks noted is gone with the machine that kept it"]
        hung = late and not any(place.failed or place.dead for place in (missing or {}).values())
        cause = "; ".join(told) or str(error).splitlines()[0]
        self.notes.end_all(cause)
        return self.stopped(cause, hung)

    def meet(self, what: str) -> None:
        """Wait on the host until all ranks are there. NCCL would wait for a missing one too, but without naming it."""
        self.any(False, what)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Give every rank the values of all ranks."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        with self.waiting(what):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, flag: bool, what: str) -> bool:
        """Tell all ranks whether any of them has a flag."""
        if self.size == 1:
            return flag
        there = torch.tensor(int(flag))
        with self.waiting(what):
            dist.all_reduce(there, dist.ReduceOp.MAX, group=self.group)
        return bool(there)

    def from_lead(self, value: Any, what: str) -> Any:
        """Give every rank the value of rank 0."""
        if self.size == 1:
            return value
        values = [value]
        with self.waiting(what):
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def share(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Give every rank the values of rank 0's tensors, in place."""
        if self.group is None:
            return
        self.meet(what)
        with self.waiting(what):
            for tensor in tensors:
                whole = tensor.detach().contiguous()  # NCCL sends nothing else
                dist.broadcast(whole, src=0, group=self._group_of(whole))
                if not tensor.is_contiguous():
                    tensor.detach().copy_(whole)

    def sum(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Add up tensors over the ranks, in place. The result is the same on every rank to the last bit."""
        if self.size == 1:
            return
        with self.waiting(what):
            for bucket in _buckets(tensors):
                if len(bucket) == 1 and bucket[0].is_contiguous():  # a large one, which is not copied
                    dist.all_reduce(bucket[0], group=self._group_of(bucket[0]))
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=self._group_of(flat))
                parts = flat.split([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def _group_of(self, tensor):
        """Return the group that sends a tensor. The default group may have no backend for tensors on the host."""
        return None if tensor.is_cuda else self.group


ALONE = Ranks()


def outlive_sigterm() -> None:
    """Let the next SIGTERM pass, where it would end the process.

    torchrun sends SIGTERM to all ranks once one has ended. Those ranks notice it as soon as torchrun does, and end by
    themselves: the signal shall not cut off what they have to say.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _buckets(tensors):
    """Split tensors into runs of at most `BUCKET` bytes."""
    bucket, size = [], 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


# gloo raises RuntimeErrors that begin with the place in its source, torch's NCCL DistBackendErrors, and a store others.
# An "enforce fail" of gloo's is no broken connection but a mistake of ours: ranks that exchange different things.
_GLOO = re.compile(
    r"^\[(?!enforce)[^\]]*\bgloo/[^\]]*:\d+\] |Application timeout caused pair closure|Gloo connectFullMesh failed"
)


def _is_of_a_connection(error):
    """Tell whether an error says that another rank cannot be reached."""
    return isinstance(error, dist.DistError) or _GLOO.search(str(error)) is not None
