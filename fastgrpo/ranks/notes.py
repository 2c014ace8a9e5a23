"""What each rank notes for the others in a store: where it is, that it failed, that it lost the others.

Who waits in vain reads there which rank did not come, and why. Nothing here waits longer than a few seconds, also
where the machine that keeps the store is gone. Notes help to explain an error; they never are one.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

PATIENCE = 10.0  # seconds that an explanation may take
_PAUSE = 0.05  # seconds between two looks at the store
Read = TypeVar("Read")


@dataclass(frozen=True)
class Place:
    """What one rank noted.

    Attributes:
        count: How many exchanges it has begun.
        what: What the last of them was for.
        failed: Its own error in a line; None where it had none.
        lost: Whether it noticed itself that another rank was missing.
        dead: Whether its process is known to have ended, as one of this machine can be.
    """

    count: int
    what: str
    failed: str | None
    lost: bool
    dead: bool


class Notes:
    """The notes of one rank, and those of the others as it reads them.

    Args:
        store: Where they are kept; a connection that only threads of this rank use. None keeps none.
        rank: The number of this rank.
        size: How many ranks there are.
    """

    def __init__(self, store: "dist.Store | None", rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self.count = 0  # exchanges that this rank has begun
        self._process = [socket.gethostname(), os.getpid()]

    def apart(self, name: str) -> "Notes":
        """Return notes of another thread of this rank, which begins exchanges of its own.

        Args:
            name: What the thread does.

        Returns:
            The notes.
        """
        store = None if self._store is None else dist.PrefixStore(name, self._store)
        return Notes(store, self.rank, self.size)

    def enter(self, what: str) -> None:
        """Note that this rank begins an exchange.

        Args:
            what: What the exchange is for.
        """
        self.count += 1
        self._set("place", json.dumps([self.count, what, *self._process]))

    def fail(self, text: str) -> None:
        """Note that this rank has failed.

        Args:
            text: The error in a line.
        """
        self._set("failed", text)

    def lose(self) -> None:
        """Note that this rank misses another one."""
        self._set("lost", "1")

    def _set(self, name, text):
        if self._store is not None:
            try:
                self._store.set(f"{name}/{self.rank}", text)
            except RuntimeError:  # dist.DistNetworkError and its kin are RuntimeErrors
                self._store = None

    def missing(self) -> dict[int, Place] | None:
        """Find the ranks that are to blame where an exchange failed. Waits until they are known, or `PATIENCE` seconds.

        Returns:
            The ranks that failed by themselves; where there are none, those that died; where none is known to be dead,
            those that do not say that they miss somebody too, and of these those that have not come so far. None where
            the store is gone.
        """

        def known(places):
            others = {rank: place for rank, place in enumerate(places) if rank != self.rank}
            silent = {rank: place for rank, place in others.items() if not place.lost}
            for named in (
                {rank: place for rank, place in others.items() if place.failed is not None},
                {rank: place for rank, place in silent.items() if place.dead},
            ):
                if named:
                    return named, True
            behind = {rank: place for rank, place in silent.items() if place.count < self.count}
            return behind or silent, len(silent) <= 1

        return self._watch(known)

    def said_by_lead(self, text: str) -> bool:
        """Tell whether rank 0 fails with the same error, and so says it for all.

        Waits until rank 0 has failed or has got further than this rank, or `PATIENCE` seconds.

        Args:
            text: The error of this rank, as it was given to `fail`.

        Returns:
            Whether rank 0 has noted the same.
        """

        def known(places):
            lead = places[0]
            return lead.failed == text, lead.failed is not None or lead.count > self.count

        return self.rank > 0 and bool(self._watch(known))

    def _watch(self, known: Callable[[list[Place]], tuple[Read, bool]]) -> Read | None:
        """Read the notes of all ranks again and again, until what `known` makes of them is final."""
        if self._store is None:
            return None
        seen, end = [None], time.monotonic() + PATIENCE

        def watch():
            final = False
            with suppress(RuntimeError):
                while not final and time.monotonic() < end:
                    seen[0], final = known([self._read(rank) for rank in range(self.size)])
                    time.sleep(0 if final else _PAUSE)
                return
            seen[0] = None

        # In a thread of its own, because an answer from a machine that is gone may never come.
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        thread.join(PATIENCE + 1)
        if thread.is_alive() or seen[0] is None:
            self._store = None
        return seen[0]

    def _read(self, rank):
        place, failed, lost = (self._get(f"{name}/{rank}") for name in ("place", "failed", "lost"))
        count, what, host, pid = json.loads(place) if place else (0, "the start", None, 0)
        return Place(count, what, failed, lost is not None, host == self._process[0] and _has_ended(pid))

    def _get(self, key):
        return self._store.get(key).decode() if self._store.check([key]) else None


def _has_ended(pid):
    """Tell whether a process of this machine has ended, also where nobody has asked for its exit code yet."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # Linux alone has the file
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return state in "ZX"
