"""Held-out rows: one data set or several by name."""

import pytest

from fastgrpo.evaluation.heldout import Evaluation
from fastgrpo.trainer.setup import prefixes, read_held_out, renamed

ROWS = [{"prompt": "a"}, {"prompt": "b"}]


def test_one_data_set_has_no_name():
    assert read_held_out(None, 3) == {}
    held_out = read_held_out(ROWS, 1)
    assert list(held_out) == [""] and list(held_out[""]) == ROWS[:1]


def test_each_data_set_of_a_dict_is_read_up_to_the_limit():
    held_out = read_held_out({"x": ROWS, "y": ROWS[1:]}, 500)
    assert [list(rows) for rows in held_out.values()] == [ROWS, ROWS[1:]]
    assert prefixes(held_out, "eval") == ["eval_x", "eval_y"] and prefixes([""], "test") == ["test"]
    for name in ("", "a/b", 3):
        with pytest.raises(ValueError, match="cannot be the name of a data set"):
            read_held_out({name: ROWS}, None)


def test_a_prefix_takes_the_place_of_eval():
    result = Evaluation({"eval/accuracy": 1.0}, {"eval/accuracy": (0.5, 1.0)}, [], [])
    assert renamed(result, "eval") is result
    assert renamed(result, "test").metrics() == {
        "test/accuracy": 1.0, "test/accuracy/ci95_low": 0.5, "test/accuracy/ci95_high": 1.0,
    }  # fmt: skip
