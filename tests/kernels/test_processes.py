"""Runs files in processes of their own, which have one mode and one driver of Triton: the interpreter, or a stand-in.

TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted/head.py
FASTGRPO_STAND_IN=90 python -m pytest tests/kernels/gpu_stand_in/losses.py      compiles for sm_90, of six GPUs
"""

import os
import re
import subprocess
import sys
from itertools import product

import pytest
from paths import ROOT

HERE = ROOT / "tests" / "kernels"
INTERPRETED, CALLS = (
    sorted(path for path in (HERE / name).glob("*.py") if path.name != "conftest.py")
    for name in ("interpreted", "gpu_stand_in")
)
INTERPRETED += [HERE / "test_vocab_parallel.py", ROOT / "tests" / "kernel_checks" / "test_cases.py"]
SLOW = [
    pytest.param(capability, [path], "", id=f"{path.name}-{capability}", marks=pytest.mark.slow)
    for capability, path in product((80, 86, 89, 90, 100, 120), CALLS)
]


def run_pytest(files, marked, may_skip=False, **environment):
    """Run pytest on some files in a fresh process; `marked` is an expression such as "not slow"."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", *map(str, files), "-q", "-x", "-p", "no:cacheprovider", "-m", marked]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert may_skip or not re.search("skipped|no tests", run.stdout.splitlines()[-1]), run.stdout[-2000:]


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted(marked):
    run_pytest(INTERPRETED, f"{marked} and not gpu", may_skip=marked == "slow", TRITON_INTERPRET="1")


@pytest.mark.parametrize(("capability", "files", "marked"), [pytest.param(90, CALLS, "not slow", id="90"), *SLOW])
def test_every_call_can_be_launched(capability, files, marked):
    run_pytest(files, marked, FASTGRPO_STAND_IN=str(capability))
