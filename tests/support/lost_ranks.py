"""Ranks of which rank 1 hangs, dies or fails before the others wait for it in an exchange; a script of torchrun too."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from fastgrpo.ranks import join

HANG = 3  # seconds that the others wait for a rank that hangs
EXCHANGES = {
    "gather": lambda ranks, what: ranks.gather("x" * 1000, what),
    "sum": lambda ranks, what: ranks.sum([torch.ones(1000), torch.ones(3)], what),
}


def exchange(end, name):
    ranks = join("cpu", 60)
    with ranks.waiting("step 3"):
        EXCHANGES[name](ranks, "the first")
        if end == "hang":
            ranks.timeout = timedelta(seconds=HANG)
            for group in (None, ranks.group):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=HANG), group)
        if ranks.rank == 1:
            if end == "hang":
                time.sleep(1000)
            if end == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("a bug\nof rank 1")
        EXCHANGES[name](ranks, "the second")


if __name__ == "__main__":
    exchange(*sys.argv[1:])
