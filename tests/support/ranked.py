"""Checks that several ranks make together, over gloo on the CPU. One start of K processes serves all of them.

A module of checks registers them with `check`; a test calls `passes` with the name of one. The first such call of a
session starts the processes, which make every check of the modules in `MODULES`.
"""

import functools
import importlib
import json
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

from ranks import LIMIT, fork, forked

MODULES = ("sharded_updates", "sharded_rollouts")
CHECKS = {}  # name -> (function of the ranks, whether it is a rarer one)


def check(function=None, *, rare=False):
    """Register a check, a function that takes the ranks and raises where something is wrong."""
    if function is None:
        return functools.partial(check, rare=rare)
    CHECKS[function.__name__] = function, rare
    return function


def names(module, rare=False):
    """The checks of one module."""
    importlib.import_module(module)
    return [name for name, (f, r) in CHECKS.items() if f.__module__ == module and r == rare]


def passes(name, size, rare=False):
    """Assert that a check passed on every rank."""
    found = _run(size, rare)
    failed = {rank: of_rank[name] for rank, of_rank in found.items() if of_rank.get(name)}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
    missing = {rank: list(of_rank)[-1:] for rank, of_rank in found.items() if name not in of_rank}
    assert not missing, f"not reached; the last checks by rank are {missing}"


@functools.cache
def _run(size, rare):
    """Fork the ranks, and read for each of them {check: what went wrong, empty where nothing did}."""
    with tempfile.TemporaryDirectory() as folder:
        forked("ranked.py", Path(folder), size, int(rare))
        files = [Path(folder, f"{rank}.jsonl") for rank in range(size)]
        lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
        return {rank: dict(map(json.loads, of_rank)) for rank, of_rank in enumerate(lines)}


def make(folder, rare):
    """Make all checks as one rank."""
    import torch

    from fastgrpo.ranks import join

    warnings.simplefilter("error", UserWarning)
    torch.use_deterministic_algorithms(True, warn_only=True)  # NaN in uninitialised memory
    ranks = join("cpu", LIMIT / 2)
    with open(f"{folder}/{ranks.rank}.jsonl", "w", buffering=1) as out:
        for name, (function, its) in CHECKS.items():
            if its != rare:
                continue
            try:
                function(ranks)
                out.write(json.dumps([name, ""]) + "\n")
            except BaseException:
                out.write(json.dumps([name, traceback.format_exc()]) + "\n")
                raise  # the other ranks may be anywhere now


if __name__ == "__main__":
    import ranked  # in which the modules of checks register theirs

    folder, size, rare = sys.argv[1:]
    for module in MODULES:
        importlib.import_module(module)
    body = functools.partial(ranked.make, folder, bool(int(rare)))
    fork({"checks": body}, folder, int(size), limit=len(ranked.CHECKS) * LIMIT)
