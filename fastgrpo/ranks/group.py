"""What the ranks of a run tell each other: objects, decisions and sums of tensors.

Every exchange has a name. Each rank notes in a store what it is about to do, so that when an exchange fails or takes
too long, those who waited can say for what, and which rank did not come.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

BUCKET = 1 << 28  # bytes that are summed at once, as a copy


class RankLost(RuntimeError):
    """Another rank failed, or did not come to an exchange in time."""


class Ranks:
    """The ranks of a run, as one of them sees it.

    Every method that exchanges something must be called by all ranks, in the same order.

    Args:
        rank: The number of this rank, from 0.
        size: How many ranks there are.
        local_rank: The number of this rank among those of its machine.
        group: The process group for what lies on the host (gloo); None where there is one process alone.
        store: Where ranks note what they are about to do; None where there is one process alone.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        group: "dist.ProcessGroup | None" = None,
        store: "dist.Store | None" = None,
    ) -> None:
        self.rank, self.size, self.local_rank, self.group, self.store = rank, size, local_rank, group, store
        self._count = 0  # exchanges so far

    @property
    def lead(self) -> bool:
        """Whether this is rank 0, which writes the files of the run and speaks to the user."""
        return self.rank == 0

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name what this rank waits for, while the context manager is open.

        Args:
            what: What the exchanges inside are for, such as "the update of step 3".

        Returns:
            A context manager that yields nothing.

        Raises:
            RankLost: An exchange failed; the error names the ranks that did not come, and what they did instead.
        """
        if self.group is None:
            yield
            return
        self._count += 1
        self.store.set(f"place/{self.rank}", json.dumps([self._count, what]))
        try:
            yield
        except dist.DistError as error:
            raise RankLost(self._told(what, error)) from error
        except RuntimeError as error:
            if not _is_of_gloo(error):
                raise
            raise RankLost(self._told(what, error)) from error

    def fail(self, text: str) -> None:
        """Note that this rank has failed, so that those who wait for it can say why.

        Args:
            text: The error.
        """
        if self.store is not None:
            with suppress(RuntimeError):  # the store may be gone
                self.store.set(f"failed/{self.rank}", text)

    def _told(self, what, error):
        """Say which ranks did not come to an exchange, and why as far as it is known."""
        told = []
        try:
            for rank in range(self.size):
                place, failed = (self._noted(f"{name}/{rank}") for name in ("place", "failed"))
                count, doing = json.loads(place) if place else (0, "nothing yet")
                if rank == self.rank:
                    continue
                if failed:
                    told.append(f"rank {rank} failed: {failed}")
                elif count < self._count:
                    told.append(f"rank {rank} did not come; it was last at {doing}")
        except RuntimeError:
            told = ["the store of the ranks is gone too"]
        cause = "; ".join(told) or str(error).splitlines()[0]
        return f"rank {self.rank} waited for {what}: {cause}"

    def _noted(self, key):
        return self.store.get(key).decode() if self.store.check([key]) else None

    def gather(self, value: Any, what: str) -> list[Any]:
        """Give every rank the values of all ranks.

        Args:
            value: Any object that can be pickled.
            what: What the values are, as `waiting` takes it.

        Returns:
            The value of each rank, in the order of the ranks.

        Raises:
            RankLost: Another rank failed or did not come.
        """
        if self.group is None:
            return [value]
        values = [None] * self.size
        with self.waiting(what):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, flag: bool, what: str) -> bool:
        """Tell all ranks whether any of them has a flag.

        Args:
            flag: The flag of this rank.
            what: What the flag says, as `waiting` takes it.

        Returns:
            Whether it is set on at least one rank.

        Raises:
            RankLost: Another rank failed or did not come.
        """
        if self.group is None:
            return flag
        there = torch.tensor(int(flag))
        with self.waiting(what):
            dist.all_reduce(there, dist.ReduceOp.MAX, group=self.group)
        return bool(there)

    def from_lead(self, value: Any, what: str) -> Any:
        """Give every rank the value of rank 0.

        Args:
            value: Any object that can be pickled; only that of rank 0 is read.
            what: What the value is, as `waiting` takes it.

        Returns:
            The value of rank 0.

        Raises:
            RankLost: Another rank failed or did not come.
        """
        if self.group is None:
            return value
        values = [value]
        with self.waiting(what):
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def share(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Give every rank the values of rank 0's tensors, in place.

        Args:
            tensors: Tensors of the same dtypes and shapes on every rank.
            what: What they are, as `waiting` takes it.

        Raises:
            RankLost: Another rank failed or did not come.
        """
        if self.group is None:
            return
        with self.waiting(what):
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def sum(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Add up tensors over the ranks, in place. The result is the same on every rank to the last bit.

        Args:
            tensors: Tensors of one dtype and on one device, of the same shapes on every rank.
            what: What they are, as `waiting` takes it.

        Raises:
            RankLost: Another rank failed or did not come.
        """
        if self.group is None:
            return
        with self.waiting(what):
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                parts = flat.split([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])


ALONE = Ranks()


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


def _is_of_gloo(error):
    """Tell whether an error of torch's is one of a connection: gloo raises plain RuntimeErrors."""
    text = str(error)
    return any(part in text for part in ("gloo", "Connection", "Timed out", "Socket", "peer"))
