"""Runs interpreted/*.py in a process of their own: TRITON_INTERPRET=1 holds for the whole process.

TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted/head.py
"""

import re

import pytest
from paths import ROOT
from processes import run_pytest

HERE = ROOT / "tests" / "kernels"
FILES = [*sorted(path for path in (HERE / "interpreted").glob("*.py") if path.name != "conftest.py"),
         HERE / "test_vocab_parallel.py", ROOT / "tests" / "kernel_checks" / "test_cases.py"]  # fmt: skip


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted(marked):
    pytest.importorskip("triton")
    run = run_pytest(FILES, f"{marked} and not gpu", TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert marked == "slow" or not re.search("skipped|no tests", run.stdout.splitlines()[-1]), run.stdout[-2000:]
