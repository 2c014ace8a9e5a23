"""YAML of settings: what it holds, and what is refused although YAML has it."""

import pytest

from fastgrpo.config.recipe import read_yaml

BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


def test_what_settings_need_is_read():
    text = "beta: 0.5\nmax_steps: 3\nreward_funcs: [a, b]\nuse_peft: true\ndevice: null  # none\n"
    assert read_yaml(text) == {
        "beta": 0.5, "max_steps": 3, "reward_funcs": ["a", "b"], "use_peft": True, "device": None,
    }  # fmt: skip
    assert read_yaml("") is None


def test_a_value_may_be_named_and_used_again():
    assert read_yaml("save_steps: &often 50\neval_steps: *often\n") == {"save_steps": 50, "eval_steps": 50}


@pytest.mark.parametrize(
    "text, match",
    [
        ("beta: 1\nseed: 2\nbeta: 3\n", "beta is given twice, in lines 1 and 3; delete one of them"),
        ("{beta: 1, beta: 1}", "beta is given twice, in lines 1 and 1"),
        (BOMB, r"line 2 has an alias \(\*name\) of a list or dictionary; repeat the value"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n", "line 3 has an alias"),
        ("a: " + "[" * 5000, "it is nested too deeply"),
        ("a: [", "expected the node content"),
        ("a: !!timestamp x", "has no attribute"),
        ("a: !!bool x", "'x'"),
        ("a: 2020-13-45", "month must be in 1..12"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("? [a]\n: 1", "found unhashable key"),
    ],
)
def test_what_cannot_be_used_is_a_value_error(text, match):
    with pytest.raises(ValueError, match=match):
        read_yaml(text)
