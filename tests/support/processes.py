"""Pytest in a process of its own, for variables that are read when a module is imported; and waiting for processes."""

import os
import subprocess
import sys
import time

from paths import ROOT


def run_pytest(files, marked, **environment):
    """Run pytest on some files in a fresh process, and return it. `marked` is an expression such as "not slow"."""
    command = [sys.executable, "-m", "pytest", *map(str, files), "-q", "-x", "-p", "no:cacheprovider", "-m", marked]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def awaited(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "what is waited for did not come within two minutes"
        time.sleep(0.02)
