"""Compiles every public call for GPUs that are not there, by gpu_stand_in/: sm_90 in CI, six GPUs in the slow tests.

A process has one driver, so one GPU: FASTGRPO_STAND_IN=90 python -m pytest tests/kernels/gpu_stand_in/losses.py
"""

import re

import pytest
from paths import ROOT
from processes import run_pytest

HERE = ROOT / "tests" / "kernels" / "gpu_stand_in"
FILES = sorted(path.name for path in HERE.glob("*.py") if path.name != "conftest.py")
SLOW = [
    pytest.param(capability, [name], "", id=f"{name}-{capability}", marks=pytest.mark.slow)
    for capability in (80, 86, 89, 90, 100, 120)
    for name in FILES
]


@pytest.mark.parametrize(("capability", "names", "marked"), [pytest.param(90, FILES, "not slow", id="90"), *SLOW])
def test_every_call_can_be_launched(capability, names, marked):
    pytest.importorskip("triton")
    result = run_pytest([HERE / name for name in names], marked, FASTGRPO_STAND_IN=str(capability))
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert not re.search("skipped|no tests", result.stdout.splitlines()[-1])
