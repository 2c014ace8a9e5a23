"""A script: three ranks, of which rank 1 fails, dies or leaves, while others wait in C, as NCCL lets them wait."""

import ctypes
import functools
import logging
import os
import signal
import sys
import threading
import time

import ranks as support

from fastgrpo.ranks import join, watch
from fastgrpo.run.signals import StopSignals


def wait_in_c():
    """Lock a mutex twice. The call never ends, and no signal interrupts it."""
    threads, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # of zeros, as a new mutex is
    threads.pthread_mutex_lock(mutex)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()  # as torchrun does
    threads.pthread_mutex_lock(mutex)


def end(how):
    ranks = join("cpu", 60)
    watch.watch(ranks)
    ranks.meet("the first")
    if how == "leave":
        logging.getLogger("fastgrpo.policy").warning("a warning")
    if ranks.rank == 1:
        if how == "fail":
            raise KeyError("a bug")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return
    with StopSignals(ranks), ranks.waiting("an update"):
        if how == "leave":
            time.sleep(1)  # several times what the watch waits
        else:
            wait_in_c()


if __name__ == "__main__":
    watch.PAUSE, watch.GRACE = 0.05, 0.2
    support.fork({how: functools.partial(end, how) for how in ("fail", "die", "leave")}, sys.argv[1])
