"""A planted error of every kind costs one line that says FAIL and why, and makes the exit code 1."""

import math
import sys

import pytest
from paths import ROOT
from planted_cases import CASES

from fastgrpo import doctor
from fastgrpo.kernel_checks import cases, runner

TABLE = "planted_cases:CASES"


def test_planted_errors_fail_the_command_and_end_their_child(monkeypatch, capsys):
    started, popen = [], runner.subprocess.Popen
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")
    monkeypatch.setattr(runner.subprocess, "Popen", lambda *args, **how: started.append(args) or popen(*args, **how))
    monkeypatch.setattr(runner, "modes_here", lambda: ("cpu",))
    monkeypatch.setattr(runner.check_all, "__defaults__", (TABLE,))
    monkeypatch.setattr(runner.check, "__defaults__", (60.0, len(CASES)))
    assert doctor.main(["--check"]) == 1
    out = capsys.readouterr().out
    table = {line.split("  ")[0]: line for line in out[out.index(runner.HEADER) :].splitlines()}
    assert {name for name in ("right", "wrong", "crash", "too large") if " FAIL " in table[name]} == {
        "wrong", "crash", "too large"}  # fmt: skip
    assert "value: 1.0e-03 (1.0e-05)" in table["wrong"]
    assert "    killed by SIGSEGV" in out and "OutOfResources" in out and "1 of 4 checks passed" in out
    assert len(started) == 3  # the first child goes on after a check that passes


@pytest.mark.parametrize("pair", ((0.0, math.nan), (math.nan, math.nan), (math.nan, 0.0), (1e-9, 0.0)), ids=str)
@pytest.mark.parametrize("place", range(3))
def test_nan_and_errors_without_allowance_fail_in_any_place(pair, place):
    entries = [("near", (9e-6, 1e-5)), ("far", (1e-9, 1e-5))]
    assert runner.Line("", "cpu", dict(entries)).reason is None
    entries.insert(place, ("value", pair))
    line = runner.Line("", "cpu", dict(entries))
    assert line.reason.startswith("the error of value is ") and line.worst[0] == "value"


@pytest.mark.parametrize("code, problem", [
    ("pass", "it ended without a result"),
    ("print('a.b.CudaError: bad access\\nset THIS for more', file=sys.stderr); sys.exit(3)",
     "a.b.CudaError: bad access"),
    ("raise TypeError('at 12:4:\\nunsupported operand')", "TypeError: at 12:4: unsupported operand"),
    ("os.abort()", "killed by SIGABRT"),
    ("sys.exit(3)", "exit code 3"),
    ("os.close(1); time.sleep(3600)", "not done after 1 s"),
])  # fmt: skip
def test_reports_why_a_child_process_failed(tmp_path, monkeypatch, code, problem):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport os, sys, time\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(program))
    seconds = 1 if problem.startswith("not done") else 60
    (line,) = runner.check(TABLE, "cpu", seconds=seconds, most=1)
    assert line.problem == problem


@pytest.mark.slow
def test_all_checks_pass_on_this_machine(capsys):
    assert doctor.main(["--check"]) == 0
    out = capsys.readouterr().out
    count = sum(mode in case.modes for mode in cases.modes_here() for case in cases.CASES)
    assert f"{count} of {count} checks passed" in out and "FAIL" not in out
