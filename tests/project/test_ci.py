"""CI and the slow tests run everything they list, and fail where a part of them fails."""

import runpy

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


def test_slow_tests_go_on_past_a_part_that_fails_and_then_fail(monkeypatch, capsys):
    main = SLOW["main"]
    monkeypatch.setitem(main.__globals__, "run", lambda part, arguments: int(part == "site"))
    assert main(["site", "aot"]) == 1 and main(["aot"]) == 0 and main(["unknown"]) == 2
    out = capsys.readouterr().out
    assert "| site | FAILED (exit status 1) |" in out and out.count("| aot | passed |") == 2
