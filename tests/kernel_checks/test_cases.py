"""Every check passes on the CPU and in the interpreter; together they launch every kernel; judges find errors."""

import os
import re

import pytest
import torch
from paths import ROOT

from fastgrpo.kernel_checks import cases
from fastgrpo.kernel_checks.cases import CASES, FACTORS
from fastgrpo.kernel_checks.runner import Line
from fastgrpo.kernels import reference

MODE = "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "cpu"


def named(mode):
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if mode in case.modes])


@pytest.fixture(scope="module")
def launched():
    """The names of the kernels that the interpreter launches in these tests."""
    names = set()
    with pytest.MonkeyPatch.context() as patch:
        if MODE == "interpreter":
            from triton.runtime.interpreter import InterpretedFunction

            get = InterpretedFunction.__getitem__
            patch.setattr(InterpretedFunction, "__getitem__",
                          lambda self, grid: names.add(self.fn.__name__) or get(self, grid))  # fmt: skip
        yield names


def check(case, mode):
    trial = case.trial(mode)
    errors = trial.judge(trial.ours())
    assert errors and Line(case.name, mode, errors).reason is None, errors


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of every exp that overflows on its way to a flag
@named(MODE)
def test_every_case_passes_without_a_gpu(case, launched, monkeypatch):
    monkeypatch.setenv("FASTGRPO_SELF_CHECK", "0")
    check(case, MODE)


def test_every_kernel_is_launched(launched):
    texts = "".join(path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    kernels = set(re.findall(r"@triton\.jit[^\n]*\ndef (_\w+_kernel)\(", texts))
    assert kernels and (MODE == "cpu" or not kernels - launched)
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.gpu
@named("gpu")
def test_every_case_passes_on_a_gpu(case, monkeypatch):
    monkeypatch.setenv("FASTGRPO_SELF_CHECK", "0")
    check(case, "gpu")


def test_detects_wrong_values_of_a_head():
    leaves, tokens = cases.random_head(20, 8, 30, torch.bfloat16, bias=True, softcap=5.0)
    how = (leaves, 5.0, lambda logits: cases.loss_of_logits(logits, objective=cases.DAPO, **tokens))
    true, simple = cases.exact(*how), cases.plain(*how)
    right = cases.judge(simple, true, simple)
    assert right.keys() == {"logps", "loss", "hidden", "weight", "bias"}
    for name, (error, allowed) in right.items():
        assert 0 <= error <= allowed < 0.02
        wrong = cases.judge({name: true[name] * (1 + 2 * FACTORS[name] * allowed) + 1e-3}, true, simple)
        assert wrong[name][0] > wrong[name][1], name


def test_detects_wrong_draws_and_wrong_attention(monkeypatch):
    monkeypatch.setattr(cases, "sample", reference.sample, raising=False)
    monkeypatch.setattr(cases, "group_decode", reference.group_decode, raising=False)
    for how in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.8, "min_p": 0.01}):
        trial = cases.draws("interpreter", torch.float, **how)
        tokens, logps, kept = trial.ours()
        assert Line("", "cpu", trial.judge((tokens, logps, kept))).reason is None
        errors = trial.judge(((tokens + 1) % 150, logps, kept))
        assert errors["wrong tokens"][0] > 0.5 and errors["logps"][0] > errors["logps"][1]
        assert trial.judge((tokens, logps, kept + 0.01))["kept"][0] > 1e-6
    trial = cases.decode("interpreter", torch.float, heads=(4, 2), depth=16)
    out = trial.ours()
    ((error, allowed),) = trial.judge(out).values()
    assert error <= allowed < 1e-4
    out[3] *= 1.001
    ((error, allowed),) = trial.judge(out).values()
    assert error > allowed
