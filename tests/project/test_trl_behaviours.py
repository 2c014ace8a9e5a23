"""docs/from-trl-behaviours.md: each behaviour that holds names a test that exists, and at least 80% hold."""

import re

from paths import ROOT

PAGE = (ROOT / "docs/from-trl-behaviours.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.search(r"\| (yes|no) \|", line)]


def test_each_behaviour_that_holds_names_a_test_that_exists():
    for behaviour, holds, where in ROWS:
        named = re.fullmatch(r"`([\w/]+\.py)::(\w+)`", where)
        assert bool(named) == (holds == "yes"), behaviour
        if named:
            text = (ROOT / "tests" / named[1]).read_text()
            assert re.search(rf"^def {named[2]}\(", text, re.M), f"{behaviour}: no test {where}"


def test_the_count_is_right_and_at_least_80_percent_hold():
    hold = sum(holds == "yes" for _, holds, _ in ROWS)
    assert f"{hold} of {len(ROWS)} hold." in PAGE
    assert len(ROWS) >= 100 and hold >= 0.8 * len(ROWS)
    assert len({behaviour for behaviour, _, _ in ROWS}) == len(ROWS)
