"""Every mutant of tests/mutants can be planted: its text is there once, and so are the files of its tests."""

import pytest
import yaml
from paths import ROOT

MUTANTS = yaml.safe_load((ROOT / "tests" / "mutants" / "mutants.yaml").read_text())


def test_names_are_unique():
    names = [mutant["name"] for mutant in MUTANTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_mutant_can_be_planted(mutant):
    assert mutant.keys() == {"name", "file", "old", "new", "why", "tests"}
    text = (ROOT / mutant["file"]).read_text()
    assert text.count(mutant["old"]) == 1, f"{mutant['old']!r} stands {text.count(mutant['old'])} times in the file"
    assert mutant["old"] != mutant["new"] and mutant["why"]
    assert mutant["tests"]
    for test in mutant["tests"]:
        path, *names = test.split("[")[0].split("::")
        assert (ROOT / path).is_file(), f"{test}: no such file"
        assert all(f" {name}" in (ROOT / path).read_text() for name in names), f"{test}: no such test"
