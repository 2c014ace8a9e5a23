"""Ranks as plain processes, without a launcher that would end the others where one of them dies."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paths import ROOT


def run_ranks(script, count, *arguments, limit=120):
    """Run a script on several ranks until all of them have ended.

    Args:
        script: The path of the script.
        count: How many ranks.
        arguments: Its arguments.
        limit: Seconds after which they are killed, which fails the test.

    Returns:
        The exit code and the output of each rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, folder = [], tempfile.TemporaryDirectory()
    outputs = [Path(folder.name) / str(rank) for rank in range(count)]
    for rank in range(count):
        launcher = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
        }  # fmt: skip
        environment = {**os.environ, **{name: str(value) for name, value in launcher.items()}}
        with open(outputs[rank], "w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(script), *map(str, arguments)],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + limit
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    late = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for process in processes:
        process.kill()
        process.wait()
    said = [output.read_text() for output in outputs]
    folder.cleanup()
    assert not late, "\n".join([f"ranks {late} did not end within {limit} s", *said])
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]
