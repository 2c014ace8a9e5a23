"""The table of checks: every case passes on the CPU and in the interpreter, and together they launch every kernel.

This file mirrors the trials too, fastgrpo/kernel_checks/losses.py, and what they are made of.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from paths import ROOT

from fastgrpo.kernel_checks.cases import CASES
from fastgrpo.kernel_checks.runner import reason
from fastgrpo.kernel_checks.worker import times_of, values_of

RUN = """
import json, sys, warnings
from triton.runtime.interpreter import InterpretedFunction
from fastgrpo.kernel_checks.cases import CASES
from fastgrpo.kernel_checks.worker import values_of
warnings.simplefilter("ignore", RuntimeWarning)
launched, get = set(), InterpretedFunction.__getitem__
InterpretedFunction.__getitem__ = lambda self, grid: (launched.add(self.fn.__name__), get(self, grid))[1]
found = {case.name: values_of(case, "interpreter") for case in CASES if "interpreter" in case.modes}
print(json.dumps([found, sorted(launched)]))
"""


def named(mode):
    return [pytest.param(case, id=case.name) for case in CASES if mode in case.modes]


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", named("cpu"))
def test_without_triton(case):
    torch.manual_seed(0)
    found = values_of(case, "cpu") | times_of(case, "cpu")
    assert reason(found) is None, found
    assert found["ms"] > 0 and found["plain_ms"] > 0 and "rate" not in found


def test_interpreted():
    """In one process, as in `doctor --check` where none fails."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, launched = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {case.name for case in CASES if "interpreter" in case.modes}
    assert not {name: reason(values) for name, values in found.items() if reason(values)}
    texts = "".join(path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    kernels = set(re.findall(r"@triton\.jit[^\n]*\ndef (_\w+_kernel)\(", texts))
    assert kernels and not kernels - set(launched)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", named("gpu"))
def test_on_a_gpu(case):
    found = values_of(case, "gpu") | times_of(case, "gpu")
    assert reason(found) is None, found
