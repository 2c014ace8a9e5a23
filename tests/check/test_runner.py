"""A planted error of every kind costs one line that says FAIL and why, and makes the exit code 1."""

from functools import partial
from pathlib import Path

import pytest
from paths import ROOT
from planted_cases import CASES

from fastgrpo import doctor
from fastgrpo.check import cases, runner

TABLE = "planted_cases:CASES"
OTHER = {"TRITON_PTXAS_PATH": "/bundled/ptxas-blackwell"}


@pytest.fixture
def planted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")


def test_a_planted_error_fails_the_command(planted, monkeypatch, capsys):
    """The wrong value, the crash and the failed launch cost their own lines; the right kernel passes."""
    monkeypatch.setattr(runner, "find_cases", lambda table: CASES[:-1])
    monkeypatch.setattr(runner, "modes_here", lambda: ("cpu",))
    monkeypatch.setattr(runner, "TABLE", TABLE)
    assert doctor.main(["--check"]) == 1
    out = capsys.readouterr().out
    table = {line.split("  ")[0]: line for line in out[out.index(runner.HEADER) :].splitlines()}
    assert " pass " in table["right"] and all(" FAIL " in table[name] for name in ("wrong", "crash", "too large"))
    assert "value: 1.0e-03 (1.0e-05)" in table["wrong"]
    assert "    killed by SIGSEGV" in out
    assert "OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376" in out
    assert "1 of 4 checks passed" in out


def test_nan_is_beyond_every_limit():
    found = {"errors": {"right": (1e-6, 1e-5), "value": (float("nan"), 1e-5), "none": (0.0, 0.0)}}
    assert runner.reason(found) == "the error of value is nan, and 1.0e-05 is allowed"
    assert runner.reason({"errors": {"none": (0.0, 0.0)}}) is None
    assert runner.reason({"errors": {"none": (1e-9, 0.0)}}) is not None


def test_a_hang_ends_at_its_limit(planted):
    (line,) = runner.check(TABLE, CASES[-1:], "cpu", {}, partial(runner.attempt, seconds=1))
    assert line.name == "hang" and not line.passed and "not done after 1 s" in str(line)


def assembler(helps):
    """A run that fails unless the other assembler is chosen, and perhaps even then."""

    def run(table, name, mode, variables):
        right = name == "right" or (variables == OTHER and helps)
        return {"errors": {"value": (0.0 if right else 1.0, 1e-5)}}

    return run


@pytest.mark.parametrize(("helps", "note"), ((True, "passes"), (False, "fails too: the error of value is 1.0e+00")))
def test_a_failed_check_is_tried_with_the_other_assembler(helps, note):
    right, wrong = runner.check(TABLE, CASES[:2], "cpu", OTHER, assembler(helps))
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
