"""docs/from-trl-behaviours.md: each behaviour that holds names a test that exists, and at least 80% hold."""

import ast
import re

from paths import ROOT

PAGE = (ROOT / "docs/from-trl-behaviours.md").read_text()
OF_EVERY_CASE = {"num_generations", "training_loss", "metrics", "global_step", "train", "weights"}
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.search(r"\| (yes|no) \|", line)]


def test_each_behaviour_that_holds_names_a_test_that_exists():
    for behaviour, holds, where in ROWS:
        named = re.fullmatch(r"`([\w/]+\.py)::(\w+)`", where)
        assert bool(named) == (holds == "yes"), behaviour
        if named:
            text = (ROOT / "tests" / named[1]).read_text()
            assert re.search(rf"^def {named[2]}\(", text, re.M), f"{behaviour}: no test {where}"


def test_a_behaviour_is_a_case_of_the_test_that_it_names():
    """The settings that a behaviour names stand in the parameters of the test where that test has many."""
    tree = ast.parse((ROOT / "tests/trainer/test_from_trl.py").read_text())
    (test,) = (node for node in tree.body if getattr(node, "name", None) == "test_training_moves_the_weights")
    given = {node.value for node in ast.walk(test.decorator_list[0]) if isinstance(node, ast.Constant)}
    batches = {"gradient_accumulation_steps", "per_device_train_batch_size"}
    rows = [behaviour for behaviour, _, where in ROWS if "::test_training_moves_the_weights" in where]
    assert len(rows) > 20
    for behaviour in rows:
        for name, _, value in re.findall(r"`(\w+)(=([^`]*))?`", behaviour):
            assert name in given | batches | OF_EVERY_CASE, f"{behaviour}: no case has {name}"
            value = {"True": True, "False": False}.get(value.strip('"'), value.strip('"'))
            assert value == "" or value in given or str(value).isdigit(), f"{behaviour}: no case has {name}={value}"


def test_the_count_is_right_and_at_least_80_percent_hold():
    hold = sum(holds == "yes" for _, holds, _ in ROWS)
    assert f"{hold} of {len(ROWS)} hold." in PAGE
    assert len(ROWS) >= 100 and hold >= 0.8 * len(ROWS)
    assert len({behaviour for behaviour, _, _ in ROWS}) == len(ROWS)
