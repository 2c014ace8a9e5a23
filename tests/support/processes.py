"""Tests that need a process of their own, because of a variable that is read when a module is imported."""

import os
import subprocess
import sys

from paths import ROOT


def run_pytest(files, marked, **environment):
    """Run pytest on some files in a fresh process.

    Args:
        files: Paths of test files, which pytest need not collect by itself.
        marked: Expression over markers, such as "not slow"; empty for all tests.
        environment: Variables of the process, beside those of this one.

    Returns:
        The finished process, with its output as text.
    """
    command = [sys.executable, "-m", "pytest", *map(str, files), "-q", "-x", "-p", "no:cacheprovider", "-m", marked]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
