"""Commands that torchrun starts as several processes on this machine."""

import os
import subprocess
import sys

from paths import ROOT


def torchrun(count, module, *argv, folder, timeout=120):
    """Run a module of the package in several processes.

    Args:
        count: How many processes.
        module: The module, such as "fastgrpo.evaluate".
        argv: Its arguments.
        folder: The working directory, from which reward functions are imported too.
        timeout: Seconds after which all of them are killed, and the test fails.

    Returns:
        The finished process of torchrun, with the output of all of them as text.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    path = os.pathsep.join(filter(None, (str(ROOT), str(folder), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [*command, "-m", module, *map(str, argv)], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
