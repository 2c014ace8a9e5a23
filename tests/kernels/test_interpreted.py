"""Runs the interpreted kernel tests, each file in a process of its own.

TRITON_INTERPRET=1 changes what @triton.jit returns, for good and for the whole process: interpreted kernels cannot
share one with compiled ones. The tests that need the interpreter therefore lie in interpreted/*.py, which pytest does
not collect by itself, and this file hands each of them to a fresh pytest with the variable set. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted/head.py
"""

import os
import re
import subprocess
import sys

import pytest
from paths import ROOT

HERE = ROOT / "tests" / "kernels" / "interpreted"
# At least so many tests pass: a file that collects nothing must not look like one that succeeds.
FILES = {
    "engine.py": 6,
    "head.py": 100,
    "losses.py": 40,
    "rollout.py": 100,
    "vocab_parallel.py": 1,
}


def test_every_interpreted_file_is_listed():
    assert {path.name for path in HERE.glob("*.py")} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_interpreted(name):
    run_file(name, "not slow", FILES[name])


@pytest.mark.slow
def test_interpreted_slowly():
    run_file("losses.py", "slow", 2)


def run_file(name, marked, at_least):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", str(HERE / name), "-q", "-x", "-p", "no:cacheprovider", "-m", marked]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert int(passed[1]) >= at_least, run.stdout[-2000:]
