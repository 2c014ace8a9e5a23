"""Runs the public calls of gpu_stand_in/ for GPUs that are not there.

A process has one driver, and so one GPU. By hand:

    FASTGRPO_STAND_IN=90 python -m pytest tests/kernels/gpu_stand_in/losses.py

test_aot.py looks at the machine code of chosen variants. This one asks whether every call that a user can make compiles
and can be launched: on sm_90 a few calls in which each option occurs, and all calls on six GPUs in the slow tests.
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
