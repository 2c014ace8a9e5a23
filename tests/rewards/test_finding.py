"""Which rewards are found by their names."""

import math

import pytest

from fastgrpo.rewards import find_reward, find_rewards


def test_a_module_that_fails_on_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "fails_on_import.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="cannot be imported: ZeroDivisionError: division by zero"):
        find_reward("fails_on_import:f")
    (tmp_path / "leaves_on_import.py").write_text("import sys\nsys.exit(0)")
    with pytest.raises(ValueError, match=r"cannot be imported: SystemExit: 0 \(.*leaves_on_import.py:2\); "):
        find_reward("leaves_on_import:f")
    with pytest.raises(ValueError, match="'math:pi' is a float, which cannot be called"):
        find_reward("math:pi")


def test_finding_functions():
    def correctness(**_):
        return []

    assert find_reward("correctness", [correctness]) is correctness
    assert find_reward("math:sqrt") is math.sqrt
    with pytest.raises(ValueError, match="no reward function 'accuracy'; the task has correctness"):
        find_reward("accuracy", [correctness])
    for find in (find_reward, lambda name: find_rewards(name, None)):  # the path of a file is no model of the hub
        with pytest.raises(ValueError, match=r"no reward function 'rewards/mine\.py'.*is named module:function"):
            find("rewards/mine.py")
    with pytest.raises(ValueError, match="cannot be imported"):
        find_reward("no_such_module:f")
    with pytest.raises(ValueError, match="cannot be imported"):
        find_reward("math:no_such_function")
