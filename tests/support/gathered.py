"""Starts a script as several ranks over gloo, without a launcher, and kills what is left of it after a limit."""

import os
import subprocess
import sys
from datetime import timedelta

import torch.distributed as dist
from paths import ROOT


def run_ranks(script, count, *argv, limit=60):
    """Run a script once for each rank, and wait for all of them.

    Args:
        script: Path of the script.
        count: How many ranks.
        argv: Its arguments.
        limit: Seconds after which every process is killed.

    Returns:
        (exit code, output) of each rank, in their order; the code is negative for one that was killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit))
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count), "PYTHONPATH": path,
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, argv)], cwd=ROOT, text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(count)
    ]  # fmt: skip
    ended = []
    try:
        for process in processes:
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            ended.append((process.returncode, output))
    finally:
        for process in processes:
            process.kill()
    return ended
