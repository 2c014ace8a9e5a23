"""Checks that several ranks make together, over gloo on the CPU. One start of K processes serves all of them.

A module of checks registers them with `check`; a test calls `passes` with the name of one. The first such call of a
session starts the processes, which make every check of the modules in `MODULES`.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

from paths import ROOT

MODULES = ("sharded_updates", "sharded_rollouts")
LIMIT = 60  # seconds that the checks of one start may take, once all ranks have begun
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
    """Start the ranks, and read for each of them {check: what went wrong, empty where nothing did}."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
        command = [sys.executable, __file__, folder, str(size), str(int(rare))]
        ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment) for rank in range(size)]
        files = [Path(folder, f"{rank}.jsonl") for rank in range(size)]
        try:
            while not all(map(Path.exists, files)) and all(process.poll() is None for process in ranks):
                time.sleep(0.1)  # imports take as long as the machine lets them
            ends = time.monotonic() + LIMIT
            for process in ranks:
                process.wait(max(0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # what is missing is told by name
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
        return {rank: dict(map(json.loads, of_rank)) for rank, of_rank in enumerate(lines)}


def _main(folder, size, rare, rank):
    import torch
    import torch.distributed as dist

    from fastgrpo.ranks import Ranks

    warnings.simplefilter("error", UserWarning)
    torch.use_deterministic_algorithms(True, warn_only=True)  # NaN in uninitialised memory
    waits = timedelta(seconds=LIMIT / 2)
    address = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=waits)
    group = dist.new_group(backend="gloo", timeout=waits)
    ranks = Ranks(rank, size, rank, group, dist.FileStore(f"{folder}/places", size))
    for module in MODULES:
        importlib.import_module(module)
    with open(f"{folder}/{rank}.jsonl", "w", buffering=1) as out:
        for name, (function, its) in sys.modules["ranked"].CHECKS.items():
            if its != rare:
                continue
            try:
                function(ranks)
                out.write(json.dumps([name, ""]) + "\n")
            except BaseException:
                out.write(json.dumps([name, traceback.format_exc()]) + "\n")
                raise  # the other ranks may be anywhere now
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3])), int(sys.argv[4]))
