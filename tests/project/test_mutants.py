"""Every mutant of tests/mutants can be planted: its text is there once, and so are the tests that must notice it."""

import pytest
import yaml
from paths import ROOT

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
