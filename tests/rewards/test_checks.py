"""What is refused as a reward function before it is called."""

import pytest
import tiny

from fastgrpo.rewards.call import Rewards


class Judge:
    def __call__(self, completions, **_):
        return [1.0] * len(completions)


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
        ("rewards:f", "^reward_funcs: 'rewards:f' of type str cannot be called; .*find_reward finds module:function"),
        (["rewards:f"], "^reward_funcs: 'rewards:f' of type str cannot be called"),
        (None, "^reward_funcs: None of type NoneType cannot be called; pass a function"),
        ([None], "^reward_funcs: None of type NoneType cannot be called"),
        ({"f": Judge()}, "^reward_funcs: .* of type dict cannot be called; pass a function .* or a list of them"),
        (iter([Judge()]), "^reward_funcs: .* of type list_iterator cannot be called"),
        (Judge, "^reward_funcs: Judge is a class; pass an instance"),
        (lambda text: [], r"^reward function '<lambda>' takes \(text\), and is called with .*; write .*\*\*columns"),
        (tiny.model(), "^reward_funcs: Qwen2ForCausalLM is a model, .*; .*RewardModel makes a function of it"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_what_is_no_function_is_refused_before_it_is_called(functions, match, on_error):
    with pytest.raises(ValueError, match=match):
        Rewards(functions, on_error=on_error)


def test_one_function_needs_no_list():
    assert Rewards(Judge()).names == Rewards([Judge()]).names == ["Judge"]
