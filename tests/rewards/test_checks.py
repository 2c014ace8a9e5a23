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
        ("rewards:f", "^reward_funcs: 'rewards:f' of type str is no function; .*find_reward finds a function"),
        (["rewards:f"], "^reward_funcs: 'rewards:f' of type str is no function"),
        (None, "^reward_funcs: None of type NoneType is no function; pass a function"),
        ([None], "^reward_funcs: None of type NoneType is no function"),
        ({"f": Judge()}, "^reward_funcs: .* of type dict is no function; pass a function .* or a list of them"),
        (iter([Judge()]), "^reward_funcs: .* of type list_iterator is no function"),
        (Judge, "^reward_funcs: <class .*Judge'> of type type is no function; .* an object that can be called"),
        (lambda text: [], r"^reward function '<lambda>' takes \(text\), and is called with .*; write .*\*\*columns"),
        (
            tiny.model(),
            "^reward_funcs: .* of type Qwen2ForCausalLM is no function; .*RewardModel makes a function",
        ),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_what_is_no_function_is_refused_before_it_is_called(functions, match, on_error):
    with pytest.raises(ValueError, match=match):
        Rewards(functions, on_error=on_error)


def test_one_function_needs_no_list():
    assert Rewards(Judge()).names == Rewards([Judge()]).names == ["Judge"]
