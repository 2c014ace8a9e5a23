"""A planted error of every kind costs one line that says FAIL and why, and makes the exit code 1."""

import json
import math
from pathlib import Path

import pytest
from paths import ROOT
from planted_cases import CASES

from fastgrpo import doctor
from fastgrpo.kernel_checks import cases, runner

TABLE = "planted_cases:CASES"
OTHER = {"TRITON_PTXAS_PATH": "/bundled/ptxas-blackwell"}


@pytest.fixture
def planted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")


def test_a_planted_error_fails_the_command(planted, monkeypatch, capsys):
    """The wrong value, the crash and the failed launch cost their own lines; right kernels beside them pass."""
    monkeypatch.setattr(runner, "find_cases", lambda table: CASES[:-1])
    monkeypatch.setattr(runner, "modes_here", lambda: ("cpu",))
    monkeypatch.setattr(runner, "TABLE", TABLE)
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
    found = {"errors": {"right": (1e-6, 1e-5), "value": (float("nan"), 1e-5), "none": (0.0, 0.0)}}
    assert runner.reason(found) == "the error of value is nan, and 1.0e-05 is allowed"
    assert runner.reason({"errors": {"none": (0.0, 0.0)}}) is None
    assert runner.reason({"errors": {"none": (1e-9, 0.0)}}) is not None


@pytest.mark.parametrize("pair", ((0.0, math.nan), (math.nan, math.nan), (math.nan, 0.0)), ids=str)
@pytest.mark.parametrize("place", range(3))
def test_nan_in_any_place_fails(pair, place):
    """Also where plain PyTorch has NaN, and wherever the entry stands among others."""
    entries = [("near", (9e-6, 1e-5)), ("far", (1e-9, 1e-5))]
    entries.insert(place, ("value", pair))
    found = {"errors": dict(entries)}
    assert runner.reason(found).startswith("the error of value is ") and runner.worst_of(found)[0] == "value"


def test_a_hang_ends_at_its_limit(planted):
    (line,) = runner.check(TABLE, CASES[-1:], "cpu", seconds=1)
    assert line.name == "hang" and not line.passed and "not done after 1 s" in str(line)


class Answers:
    """In place of a process: tells its number as an error, and crashes at the case of that name."""

    number = 0

    def __init__(self, command, environment):
        Answers.number += 1
        self.number = Answers.number

    def ask(self, line, seconds):
        asked = json.loads(line)
        if asked["name"] == "crash" and asked["step"] == "times":
            return {"problem": "killed by SIGSEGV"}
        return {"errors": {"value": (float(self.number), 2.0)}} if asked["step"] == "values" else {"ms": 1.0}

    def close(self):
        pass


def test_a_process_goes_on_until_a_check_fails(monkeypatch):
    """The third process is the first one whose number is beyond what is allowed, so that each of its checks fails."""
    monkeypatch.setattr(runner, "Server", Answers)
    monkeypatch.setattr(Answers, "number", 0)
    checks = runner.Checks(TABLE, "cpu", {})
    found = [checks.run(name) for name in ("a", "b", "crash", "c", "crash", "d", "e")]
    assert [values["errors"]["value"][0] for values in found] == [1, 1, 1, 2, 2, 3, 4]
    assert [runner.reason(values) is None for values in found] == [True, True, False, True, False, False, False]
    assert "problem" in found[2] and "ms" in found[3] and "ms" not in found[5]  # no time of what is wrong
    assert checks.run("f", ("times",)) == {"ms": 1.0}


def assembler(helps):
    """Checks that fail unless the other assembler is chosen, and perhaps even then."""

    class Planted:
        def __init__(self, table, mode, variables, seconds):
            self.variables = variables

        def run(self, name, steps):
            right = name == "right" or (self.variables == OTHER and helps)
            return {"errors": {"value": (0.0 if right else 1.0, 1e-5)}}

        def close(self):
            pass

    return Planted


@pytest.mark.parametrize(("helps", "note"), ((True, "passes"), (False, "fails too: the error of value is 1.0e+00")))
def test_a_failed_check_is_tried_with_the_other_assembler(helps, note):
    right, wrong = runner.check(TABLE, CASES[:2], "cpu", OTHER, start=assembler(helps))
    assert right.passed and right.note == ""
    assert not wrong.passed  # what people get without the variable is wrong
    assert f"with TRITON_PTXAS_PATH=/bundled/ptxas-blackwell it {note}" in str(wrong)


@pytest.mark.parametrize(
    ("capability", "variable", "program"),
    (((9, 0), "TRITON_PTXAS_PATH", "ptxas-blackwell"), ((10, 0), "TRITON_PTXAS_BLACKWELL_PATH", "ptxas")),
)
def test_the_other_assembler_is_in_tritons_wheel(monkeypatch, capability, variable, program):
    """Triton reads these variables, and takes its other program without them."""
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    ((name, path),) = runner.other_assembler().items()
    assert name == variable and Path(path).name == program and Path(path).exists()
    arch = 10 * capability[0]
    before = get_ptxas(arch).path
    monkeypatch.setenv(name, path)
    assert Path(before).name != program and get_ptxas(arch).path == path == knobs.NvidiaTool.from_path(path).path


def test_times_and_rates_stand_in_the_line():
    found = {"errors": {"a": (1e-6, 1e-5), "b": (9e-6, 1e-5)}, "ms": 2.0, "plain_ms": 4.0, "rate": "600 TFLOP/s",
             "of_limit": 0.75}  # fmt: skip
    text = str(runner.Line("kernel", "gpu", found))
    assert all(part in text for part in ("pass", "b: 9.0e-06 (1.0e-05)", "2.000", "0.50", "600 TFLOP/s", "75%"))
    assert "2.000" in str(runner.Line("kernel", "gpu", found | {"plain_ms": None}))


@pytest.mark.slow
def test_the_whole_table_passes_here(capsys):
    assert doctor.main(["--check"]) == 0
    out = capsys.readouterr().out
    count = sum(mode in case.modes for mode in cases.modes_here() for case in cases.CASES)
    assert f"{count} of {count} checks passed" in out and "FAIL" not in out
