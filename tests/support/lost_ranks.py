"""A script: three ranks, of which rank 1 hangs, dies or fails before the others wait for it in an exchange."""

import functools
import os
import signal
import sys
import time
from datetime import timedelta

import ranks as support
import torch
import torch.distributed as dist

from fastgrpo.ranks import join

HANG = 3  # seconds that the others wait for a rank that hangs
EXCHANGES = {
    "gather": lambda ranks, what: ranks.gather("x" * 1000, what),
    "any": lambda ranks, what: ranks.any(False, what),
    "from_lead": lambda ranks, what: ranks.from_lead("x", what),
    "sum": lambda ranks, what: ranks.sum([torch.ones(1000), torch.ones(3)], what),
}
CASES = ("hang-gather", "hang-sum", "die-any", "die-sum", "fail-from_lead", "fail-sum")


def exchange(end, name):
    """Let rank 1 end before the second exchange of a step."""
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
        for _ in range(3):  # a broadcast's sender need not wait for all
            EXCHANGES[name](ranks, "the second")


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        sys.exit(exchange(*sys.argv[1:]))
    cases = {case: functools.partial(exchange, *case.split("-")) for case in CASES}
    support.HANGING |= {case: (1,) for case in cases if case.startswith("hang")}
    support.fork(cases, sys.argv[1])
