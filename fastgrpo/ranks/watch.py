"""A thread that ends this rank where its main thread cannot notice that the run has lost another rank.

On GPUs the main thread may be in a call that waits for NCCL, and so for the other ranks. No exception reaches it
there, and no handler of a signal runs. So a thread looks once a second whether a rank has failed or died, lets the main
thread notice it by itself, and otherwise says so in its place and ends the process.

SIGTERM alone says nothing of this: it also asks for a stop after the step, for which the main thread may wait long.
"""

import os
import threading
import time

from fastgrpo.ranks.failure import end, left
from fastgrpo.ranks.group import Ranks

PAUSE = 1.0  # seconds between two looks
GRACE = 20.0  # seconds for the main thread; torchrun ends by SIGKILL what is there after 30


def watch(ranks: Ranks) -> None:
    """Start the thread. All ranks must call this.

    A rank that fails is told of as lost only when it ends, so that a checkpoint which the ranks write is finished
    before. One that ends without an error is not lost.
    """
    processes = ranks.gather(ranks.notes.process, "the processes of all ranks")
    machine, own = ranks.notes.process
    beside = {rank: pid for rank, (where, pid) in enumerate(processes) if where == machine and pid != own}
    threading.Thread(target=_watch, args=(ranks, beside), name="watch", daemon=True).start()


def _watch(ranks, beside):
    cause = None
    while cause is None:
        time.sleep(PAUSE)
        try:
            cause = ranks.notes.end_of_all(beside)
        except RuntimeError:  # the store has gone with the rank or the launcher that kept it
            return
    time.sleep(GRACE)
    if not left():
        end(ranks.stopped(cause), ranks.notes, "")
        os._exit(1)
