"""A planted error of every kind costs one line that says FAIL and why, and makes the exit code 1."""

import math
import sys

import pytest
from paths import ROOT
from planted_cases import CASES

from fastgrpo import doctor
from fastgrpo.kernel_checks import cases, runner

TABLE = "planted_cases:CASES"


@pytest.fixture
def planted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")


def test_a_planted_error_fails_the_command(planted, monkeypatch, capsys):
    """The wrong value, the crash and the failed launch cost their own lines; right kernels beside them pass."""
    monkeypatch.setattr(runner, "modes_here", lambda: ("cpu",))
    monkeypatch.setattr(runner.check_all, "__defaults__", (TABLE,))
    monkeypatch.setattr(runner.check, "__defaults__", (60.0, len(CASES) - 1))
    assert doctor.main(["--check"]) == 1
    out = capsys.readouterr().out
    table = {line.split("  ")[0]: line for line in out[out.index(runner.HEADER) :].splitlines()}
    assert all(" pass " in table[name] for name in ("right", "right again"))
    assert all(" FAIL " in table[name] for name in ("wrong", "crash", "too large"))
    assert "value: 1.0e-03 (1.0e-05)" in table["wrong"]
    assert "    killed by SIGSEGV" in out
    assert "OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376" in out
    assert "2 of 5 checks passed" in out


def test_nan_is_beyond_every_limit():
    errors = {"right": (1e-6, 1e-5), "value": (float("nan"), 1e-5), "none": (0.0, 0.0)}
    assert runner.Line("", "cpu", errors).reason == "the error of value is nan, and 1.0e-05 is allowed"
    assert runner.Line("", "cpu", {"none": (0.0, 0.0)}).reason is None
    assert runner.Line("", "cpu", {"none": (1e-9, 0.0)}).reason is not None


@pytest.mark.parametrize("pair", ((0.0, math.nan), (math.nan, math.nan), (math.nan, 0.0)), ids=str)
@pytest.mark.parametrize("place", range(3))
def test_nan_in_any_place_fails(pair, place):
    """Also where plain PyTorch has NaN, and wherever the entry stands among others."""
    entries = [("near", (9e-6, 1e-5)), ("far", (1e-9, 1e-5))]
    entries.insert(place, ("value", pair))
    line = runner.Line("", "cpu", dict(entries))
    assert line.reason.startswith("the error of value is ") and line.worst[0] == "value"


def test_a_child_goes_on_until_a_check_fails(planted, monkeypatch):
    """The children's numbers: a crash, a wrong value and a failed launch were the last of their children."""
    started, popen = [], runner.subprocess.Popen
    monkeypatch.setattr(runner.subprocess, "Popen", lambda *args, **how: started.append(args) or popen(*args, **how))
    children = {line.name: len(started) for line in runner.check(TABLE, "cpu", most=5)}
    assert children == {"right": 1, "wrong": 1, "crash": 2, "too large": 3, "right again": 4}


@pytest.mark.parametrize(
    ("code", "problem"),
    (
        ("pass", "it ended without a result"),
        ("raise KeyError('gone')", "KeyError: 'gone'"),
        ("print('a.b.CudaError: bad access\\nset THIS for more', file=sys.stderr); sys.exit(3)",
         "a.b.CudaError: bad access"),
        ("raise TypeError('at 12:4:\\nunsupported operand')", "TypeError: at 12:4: unsupported operand"),
        ("os.abort()", "killed by SIGABRT"),
        ("sys.exit(3)", "exit code 3"),
        ("os.close(1); time.sleep(3600)", "not done after 1 s"),
    ),
)  # fmt: skip
def test_why_a_child_gave_no_answer(tmp_path, monkeypatch, code, problem):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport os, sys, time\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(program))
    seconds = 1 if problem.startswith("not done") else 60
    (line,) = runner.check(TABLE, "cpu", seconds=seconds, most=1)
    assert line.problem == problem


@pytest.mark.slow
def test_the_whole_table_passes_here(capsys):
    assert doctor.main(["--check"]) == 0
    out = capsys.readouterr().out
    count = sum(mode in case.modes for mode in cases.modes_here() for case in cases.CASES)
    assert f"{count} of {count} checks passed" in out and "FAIL" not in out
