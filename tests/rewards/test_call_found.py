"""Which functions are found by their names, and what is refused as a function before it is called."""

import math

import pytest
import tiny

from fastgrpo.rewards.call import Rewards, load_reward


class Judge:
    def __call__(self, completions, **_):
        return [1.0] * len(completions)


def test_a_module_that_fails_on_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "fails_on_import.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="cannot be imported: ZeroDivisionError: division by zero"):
        load_reward("fails_on_import:f")
    (tmp_path / "leaves_on_import.py").write_text("import sys\nsys.exit(0)")
    with pytest.raises(ValueError, match=r"cannot be imported: SystemExit: 0 \(.*leaves_on_import.py:2\); "):
        load_reward("leaves_on_import:f")
    with pytest.raises(ValueError, match="'math:pi' is a float, which cannot be called"):
        load_reward("math:pi")


def test_bad_sets_are_refused():
    def f(**_):
        return []

    with pytest.raises(ValueError, match="at least one"):
        Rewards([])
    with pytest.raises(ValueError, match="2 entries for 1"):
        Rewards([f], [1.0, 2.0])


@pytest.mark.parametrize(
    "functions, match",
    [
        ("rewards:f", "^reward_funcs: 'rewards:f' of type str cannot be called; .*load_reward finds module:function"),
        (["rewards:f"], "^reward_funcs: 'rewards:f' of type str cannot be called"),
        (None, "^reward_funcs: None of type NoneType cannot be called; pass a function"),
        ([None], "^reward_funcs: None of type NoneType cannot be called"),
        ({"f": Judge()}, "^reward_funcs: .* of type dict cannot be called; pass a function .* or a list of them"),
        (iter([Judge()]), "^reward_funcs: .* of type list_iterator cannot be called"),
        (Judge, "^reward_funcs: Judge is a class; pass an instance"),
        (tiny.model(), "^reward_funcs: Qwen2ForCausalLM is a model, .*; .*RewardModel makes a function of it"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_what_is_no_function_is_refused_before_it_is_called(functions, match, on_error):
    with pytest.raises(ValueError, match=match):
        Rewards(functions, on_error=on_error)


def test_one_function_needs_no_list():
    assert Rewards(Judge()).names == Rewards([Judge()]).names == ["Judge"]


def test_finding_functions():
    def correctness(**_):
        return []

    assert load_reward("correctness", [correctness]) is correctness
    assert load_reward("math:sqrt") is math.sqrt
    with pytest.raises(ValueError, match="no reward function 'accuracy'; the task has correctness"):
        load_reward("accuracy", [correctness])
    with pytest.raises(ValueError, match="cannot be imported"):
        load_reward("no_such_module:f")
    with pytest.raises(ValueError, match="cannot be imported"):
        load_reward("math:no_such_function")
