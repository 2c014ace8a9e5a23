"""CI, the slow tests and the mutants run everything they list, and fail where a part of them fails."""

import os
import runpy
import subprocess

import pytest
import yaml
from paths import ROOT

SLOW = runpy.run_path(ROOT / "tests" / "slow.py")


def test_the_workflows_run_ci_and_every_slow_part():
    """CI runs on the versions of Python that setup.py allows and the README names."""
    ci, nightly = (yaml.safe_load((ROOT / ".github" / "workflows" / f"{x}.yml").read_text()) for x in ("ci", "nightly"))
    (job,) = ci["jobs"].values()
    assert job["steps"][-1]["run"] == ".ci/run"
    versions = job["strategy"]["matrix"]["python"]
    assert f"Python {versions[0]} to {versions[-1]}" in (ROOT / "README.md").read_text()
    assert f'python_requires=">={versions[0]}"' in (ROOT / "setup.py").read_text()
    (job,) = nightly["jobs"].values()
    assert job["strategy"]["matrix"]["part"] == list(SLOW["PARTS"])
    named = {word for part in SLOW["PARTS"].values() for word in part if word.startswith("tests/")}
    assert all((ROOT / name).exists() for name in named)


@pytest.mark.parametrize("failing", [None, ".venv/.installed", "lint", "test", "test-quantization"])
def test_ci_ends_at_a_part_that_fails(failing, tmp_path):
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "made $1"\n[ "$1" != "{failing}" ]\n')
    (tmp_path / "chromedriver").write_text("#!/bin/sh\n")
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True)
    made = [line.removeprefix("made ") for line in done.stdout.splitlines() if line.startswith("made ")]
    targets = [".venv/.installed", "lint", "test", "test-quantization"]
    assert made == targets[: targets.index(failing) + 1 if failing else None]
    assert (done.returncode == 0) == (failing is None)
    assert done.stdout.count("(exit status ") == 1 + len(made)  # the table of times


def test_slow_tests_go_on_past_a_part_that_fails_and_then_fail(monkeypatch, capsys):
    main = SLOW["main"]
    monkeypatch.setitem(main.__globals__, "run", lambda part, arguments: int(part == "site"))
    assert main(["site", "aot"]) == 1 and main(["aot"]) == 0 and main(["unknown"]) == 2
    out = capsys.readouterr().out
    assert "| site | FAILED (exit status 1) |" in out and out.count("| aot | passed |") == 2


MUTANTS = yaml.safe_load((ROOT / "tests" / "mutants" / "mutants.yaml").read_text())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_mutant_can_be_planted(mutant):
    assert mutant.keys() == {"name", "file", "old", "new", "why", "tests"}
    assert [other["name"] for other in MUTANTS].count(mutant["name"]) == 1
    text = (ROOT / mutant["file"]).read_text()
    assert text.count(mutant["old"]) == 1, f"{mutant['old']!r} stands {text.count(mutant['old'])} times in the file"
    assert mutant["old"] != mutant["new"] and mutant["why"] and mutant["tests"]
    for test in mutant["tests"]:
        path, *names = test.split("[")[0].split("::")
        assert (ROOT / path).is_file(), f"{test}: no such file"
        assert all(f" {name}" in (ROOT / path).read_text() for name in names), f"{test}: no such test"
