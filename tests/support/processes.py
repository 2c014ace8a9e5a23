"""Tests that need a process of their own, because of a variable that is read when a module is imported."""

import os
import subprocess
import sys

from paths import ROOT


def run_pytest(files, marked, **environment):
    """Run pytest on some files in a fresh process, and return it. `marked` is an expression such as "not slow"."""
    command = [sys.executable, "-m", "pytest", *map(str, files), "-q", "-x", "-p", "no:cacheprovider", "-m", marked]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
