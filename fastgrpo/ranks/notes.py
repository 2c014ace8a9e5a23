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


def in_a_line(error: BaseException) -> str:
    """Return an error as other ranks show it."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


@dataclass(frozen=True)
class Place:
    """What one rank noted.

    Attributes:
        count: How many exchanges it has begun.
        what: What the last of them was for.
        failed: Its own error in a line; None where it had none.
        lost: Whether it noticed itself that another rank was missing.
        dead: Whether its process is known to have ended, as one of this machine can be.
        here: Whether it is a rank of this machine.
    """

    count: int
    what: str
    failed: str | None
    lost: bool
    dead: bool
    here: bool


class Notes:
    """The notes of one rank, and those of the others as it reads them."""

    def __init__(self, store: "dist.Store | None", rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self.count = 0  # exchanges that this rank has begun
        self._failed = False  # whether an error is noted
        self.process = [_machine(), os.getpid()]

    def apart(self, name: str) -> "Notes":
        """Return notes of another thread of this rank, which begins exchanges of its own."""
        store = None if self._store is None else dist.PrefixStore(name, self._store)
        return Notes(store, self.rank, self.size)

    def enter(self, what: str) -> None:
        """Note that this rank begins an exchange. An error that was noted before has not ended this rank, so it goes."""
        if self._failed:
            self._failed = False
            self._change("failed", lambda store, key: store.delete_key(key))
        self.count += 1
        self._set("place", json.dumps([self.count, what, *self.process]))

    def fail(self, text: str) -> None:
        """Note that this rank has failed."""
        self._failed = True
        self._set("failed", text)

    def lose(self) -> None:
        """Note that this rank misses another one."""
        self._set("lost", "1")

    def leave(self) -> None:
        """Note that this rank ends without an error."""
        self._set("left", "1")

    def end_all(self, cause: str) -> None:
        """Note that the run cannot go on. What the first rank noted stays, as the rest follows from it."""
        self._change("end", lambda store, _: store.compare_set("end", "", cause))

    def end_of_all(self, beside: dict[int, int]) -> str | None:
        """Tell whether the run cannot go on, by a look at one key of the store and at processes of this machine."""
        for rank, process in beside.items():
            if _has_ended(process) and self._get(f"left/{rank}") is None:
                self.end_all(fate(rank, self._read(rank)))
        return self._get("end")

    def _set(self, name, text):
        self._change(name, lambda store, key: store.set(key, text))

    def _change(self, name, change):
        """Change the note of this rank that has a name, unless the store is gone."""
        if self._store is not None:
            try:
                change(self._store, f"{name}/{self.rank}")
            except RuntimeError:  # dist.DistNetworkError and its kin are RuntimeErrors
                self._store = None

    def missing(self, late: bool = False) -> dict[int, Place] | None:
        """Find the ranks that are to blame where an exchange failed. Waits until they are known, or `PATIENCE` seconds."""

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
            # The connections of a process are closed a little before it has ended.
            ending = not late and any(place.here for place in silent.values())
            return behind or silent, len(silent) <= 1 and not ending

        return self._watch(known)

    def said_by_lead(self, text: str) -> bool:
        """Tell whether rank 0 fails with the same error, and so says it for all.

        Waits until rank 0 has failed or has got further than this rank, or `PATIENCE` seconds.
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
        here = host == self.process[0]
        return Place(count, what, failed, lost is not None, here and _has_ended(pid), here)

    def _get(self, key):
        store = self._store
        if store is None:
            raise RuntimeError("the store is gone")
        return store.get(key).decode() if store.check([key]) else None


def fate(rank: int, place: Place, late: bool = False) -> str:
    """Say what became of a rank that did not come to an exchange."""
    if place.failed is not None:
        return f"rank {rank} failed: {place.failed}"
    how = "died" if place.dead else "did not come in time" if late else "does not answer"
    return f"rank {rank} {how}; it was last at {place.what}"


def _machine():
    """Name what the numbers of processes belong to: containers of a machine may have numbers of their own."""
    with suppress(OSError):  # Linux alone has the file
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


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
