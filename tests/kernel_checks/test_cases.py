"""Every check passes on the CPU and in the interpreter; together they launch every kernel; judges find errors."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from paths import ROOT

from fastgrpo.kernel_checks import cases
from fastgrpo.kernel_checks.cases import CASES, FACTORS
from fastgrpo.kernel_checks.runner import Line
from fastgrpo.kernels import reference

RUN = """
import json, sys, warnings
from triton.runtime.interpreter import InterpretedFunction
from fastgrpo.kernel_checks.cases import CASES
warnings.simplefilter("ignore", RuntimeWarning)
launched, get = set(), InterpretedFunction.__getitem__
InterpretedFunction.__getitem__ = lambda self, grid: (launched.add(self.fn.__name__), get(self, grid))[1]
trials = {case.name: case.trial("interpreter") for case in CASES if "interpreter" in case.modes}
print(json.dumps([{name: trial.judge(trial.ours()) for name, trial in trials.items()}, sorted(launched)]))
"""


def named(mode):
    return [pytest.param(case, id=case.name) for case in CASES if mode in case.modes]


def check(case, mode):
    trial = case.trial(mode)
    errors = trial.judge(trial.ours())
    assert errors and Line(case.name, mode, errors).reason is None, errors


@pytest.mark.parametrize("case", named("cpu"))
def test_without_triton(case):
    check(case, "cpu")


def test_interpreted():
    """In one process, as in `doctor --check` where none fails."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "FASTGRPO_SELF_CHECK": "0"}
    how = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, env=environment, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    found, launched = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == sum("interpreter" in case.modes for case in CASES)  # names are unique
    lines = [Line(name, "interpreter", errors) for name, errors in found.items()]
    assert not [str(line) for line in lines if line.reason or not line.errors]
    texts = "".join(path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    kernels = set(re.findall(r"@triton\.jit[^\n]*\ndef (_\w+_kernel)\(", texts))
    assert kernels and not kernels - set(launched)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", named("gpu"))
def test_on_a_gpu(case, monkeypatch):
    monkeypatch.setenv("FASTGRPO_SELF_CHECK", "0")
    check(case, "gpu")


def test_a_wrong_value_of_a_head_is_beyond_what_is_allowed():
    torch.manual_seed(0)
    leaves, tokens = cases.random_head(20, 8, 30, torch.bfloat16, bias=True, softcap=5.0)
    how = (leaves, 5.0, lambda logits: cases.loss_of_logits(logits, objective=cases.DAPO, **tokens))
    true, simple = cases.exact(*how), cases.plain(*how)
    right = cases.judge(simple, true, simple)
    assert right.keys() == {"logps", "loss", "hidden", "weight", "bias"}
    for name, (error, allowed) in right.items():
        assert 0 <= error <= allowed < 0.02
        wrong = cases.judge({name: true[name] * (1 + 2 * FACTORS[name] * allowed) + 1e-3}, true, simple)
        assert wrong[name][0] > wrong[name][1], name


@pytest.mark.parametrize("how", ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.8, "min_p": 0.01}), ids=str)
def test_wrong_draws_are_found(how, monkeypatch):
    """The reference draws in place of the kernel; then other tokens, and another kept mass."""
    monkeypatch.setattr(cases, "sample", reference.sample, raising=False)
    torch.manual_seed(0)
    trial = cases.draws("interpreter", torch.float, **how)
    tokens, logps, kept = trial.ours()
    assert Line("", "cpu", trial.judge((tokens, logps, kept))).reason is None
    errors = trial.judge(((tokens + 1) % 150, logps, kept))
    assert errors["wrong tokens"][0] > 0.5 and errors["logps"][0] > errors["logps"][1]
    assert trial.judge((tokens, logps, kept + 0.01))["kept"][0] > 1e-6


def test_wrong_attention_is_found(monkeypatch):
    monkeypatch.setattr(cases, "group_decode", reference.group_decode, raising=False)
    torch.manual_seed(0)
    trial = cases.decode("interpreter", torch.float, heads=(4, 2), depth=16)
    out = trial.ours()
    ((error, allowed),) = trial.judge(out).values()
    assert error <= allowed < 1e-4
    out[3] *= 1.001
    ((error, allowed),) = trial.judge(out).values()
    assert error > allowed
