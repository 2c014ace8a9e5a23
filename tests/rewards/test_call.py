"""Reward functions: lookup, validation, calls, names, weights, and failures."""

import asyncio
import copy
import dataclasses
import itertools
import math
from functools import partial

import pytest
import tiny
import torch
from samples import answer

from fastgrpo.data.records import Prompt, TrainerState
from fastgrpo.data.rows import Rows
from fastgrpo.rewards import find_reward, find_rewards
from fastgrpo.rewards.call import Rewards, reward_matrix

PROMPTS = [Prompt([1], "p0", {"answer": "x"}), Prompt([2], "p1", {"answer": "y", "hint": 7})]
COMPLETIONS = [answer(PROMPTS[0], [3], "c0"), answer(PROMPTS[1], [4, 5], "c1")]


class Judge:
    def __call__(self, completions, **_):
        return [1.0] * len(completions)


def returns(value, name="reward"):
    """A reward function that returns a value, or what a function returns."""

    def reward(**_):
        return value() if callable(value) else value

    reward.__name__ = name
    return reward


def judge(rewards, completions=COMPLETIONS):
    return rewards(completions, "state")


def call(rewards):
    return reward_matrix(judge(rewards).completions)


def test_a_function_is_found_by_its_name(tmp_path, monkeypatch):
    correctness = returns([], "correctness")
    assert find_reward("correctness", [correctness]) is correctness
    assert find_reward("math:sqrt") is math.sqrt
    for find in (find_reward, lambda name: find_rewards(name, None)):  # the path of a file is no model of the hub
        with pytest.raises(ValueError, match=r"unknown reward function 'rewards/mine\.py'"):
            find("rewards/mine.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fails_on_import.py").write_text("1 / 0")
    (tmp_path / "leaves_on_import.py").write_text("import sys\nsys.exit(0)")
    modules = ["no_such_module:f", "math:no_such_function", "math:pi", "fails_on_import:f", "leaves_on_import:f"]
    for name in ["accuracy", *modules]:
        with pytest.raises(ValueError, match=f"reward function '{name}'"):
            find_reward(name, [correctness])


NO_FUNCTIONS = ["rewards:f", ["rewards:f"], None, [None], {"f": Judge()}, iter([Judge()]), Judge, tiny.model(), []]


def test_rejects_wrong_arguments():
    for functions in [*NO_FUNCTIONS, lambda text: []]:
        for on_error in ("raise", "skip"):
            with pytest.raises(ValueError, match=r"reward_funcs|reward function"):
                Rewards(functions, on_error=on_error)
    with pytest.raises(ValueError, match="reward_weights"):
        Rewards(Judge(), [1.0, 2.0])
    assert Rewards(Judge()).names == Rewards([Judge()]).names == ["Judge"]


def test_calls_functions_like_trl():
    """A column may have any name: `function` is common, and `completion` holds the references of other trainers."""
    seen, names = {}, ("function", "arguments", "call", "completion", "not a name")

    def reward(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [1, 0.5]

    given = [dataclasses.replace(c, columns=c.columns | {name: name[0] for name in names}) for c in COMPLETIONS]
    assert reward_matrix(judge(Rewards([reward]), given).completions).tolist() == [[1.0], [0.5]]
    assert callable(seen.pop("log_metric")) and callable(seen.pop("log_extra")) and callable(seen.pop("log_steps"))
    assert seen == {
        "prompts": ["p0", "p1"], "completions": ["c0", "c1"], "answer": ["x", "y"], "hint": [None, 7],
        "completion_ids": [[3], [4, 5]], "trainer_state": "state",
    } | {name: [name[0]] * 2 for name in names}  # fmt: skip


def test_a_call_gets_the_columns_of_all_data():
    rewards = Rewards(lambda completions, hint, **_: [0.0 if h is None else 1.0 for h in hint])
    rewards.columns = Rows([c.columns for c in COMPLETIONS], str).columns
    assert rewards.columns == ["answer", "hint"]
    assert reward_matrix(rewards(COMPLETIONS[:1]).completions).tolist() == [[0.0]]


def test_each_function_gets_its_own_copies():
    prompt = Prompt([1], [{"role": "user", "content": "p"}], {"tests": [[1, 2]]})
    content = [{"role": "assistant", "content": "c"}]
    group = [answer(prompt, [3, 4], content) for _ in range(2)]
    before, state = copy.deepcopy([(c.prompt, c.ids, c.content) for c in group]), TrainerState(3, 9, 0.0, 8)
    seen = []

    def reward(prompts, completions, completion_ids, trainer_state, tests, **_):
        seen.append(copy.deepcopy((prompts, completions, completion_ids, trainer_state, tests)))
        prompts[0] += completions[0]  # the second completion has the same prompt: its copy must not grow
        assert len(prompts[1]) == 1
        prompts[0][0].clear()
        completion_ids[0].pop()
        completion_ids[1][0] = 7
        completions[0][0]["content"] = "better"
        completions.clear()
        tests[0][0].append(3)
        assert tests[1] == [[1, 2]]
        trainer_state.global_step = 0
        return [1.0, 0.0]

    judged = Rewards([reward, reward])(group, state)
    assert seen[0] == seen[1]
    assert state.global_step == 3
    assert [(c.prompt, c.ids, c.content) for c in group] == before
    assert [(c.prompt, c.ids, c.content) for c in judged.completions] == before


def test_uses_default_weights_and_ignores_none_rewards():
    rewards = Rewards([returns([1.0, None], "first"), returns([10.0, None], "second")], [2.0, 0.5])
    per_function = call(rewards)
    assert per_function[0].tolist() == [1.0, 10.0] and per_function[1].isnan().all()
    total = rewards.total(per_function)
    assert total[0] == 7.0 and math.isnan(total[1])
    assert rewards.total(torch.tensor([[math.nan, 4.0]])).item() == 2.0


def test_async_functions_run_together_also_where_a_loop_runs_already():
    order = []

    async def slow(**_):
        order.append("slow starts")
        await asyncio.sleep(0.01)
        order.append("slow ends")
        return [1, 2]

    async def quick(**_):
        order.append("quick")
        return [3, 4]

    async def notebook():
        return call(Rewards([slow, returns([5, 6]), quick]))

    for result in (call(Rewards([slow, returns([5, 6]), quick])), asyncio.run(notebook())):
        assert result.tolist() == [[1, 5, 3], [2, 6, 4]]
    assert order == ["slow starts", "quick", "slow ends"] * 2


BAD = [
    [1.0], [1.0, "good"], [math.nan, 1.0], [1.0, -math.inf], [1.0, 3.5e38], [1.0, 10**400], 7.0, "ab",
    {1.0, 2.0}, {"a": 1.0, "b": 2.0}, torch.ones(2, 2), itertools.repeat(1.0), lambda: ({}[text] for text in "ab"),
]  # fmt: skip


@pytest.mark.parametrize("result", BAD, ids=range(len(BAD)))
def test_a_bad_result_is_a_failure_of_its_function(result):
    with pytest.raises(ValueError, match="reward function 'reward' r"):
        call(Rewards([returns(result)]))
    skipping = judge(Rewards([returns(result), Judge()], on_error="skip"))
    rewards = reward_matrix(skipping.completions)
    assert rewards[:, 1].tolist() == [1.0, 1.0] and rewards[:, 0].isnan().sum() == skipping.errors["reward"] > 0


def test_functions_of_one_name_are_told_apart():
    two = returns([0.0, 0.0], "near_2")
    functions = [*(returns([value] * 2, "near") for value in (1.0, 2.0)), two, returns([3.0, 3.0], "near")]
    rewards = Rewards([*functions, Judge(), Judge(), partial(two)])
    assert rewards.names == ["near", "near_2", "near_2_2", "near_3", "Judge", "Judge_2", "near_2_3"]
    assert list(judge(rewards).completions[0].rewards.values()) == [1.0, 2.0, 0.0, 3.0, 1.0, 1.0, 0.0]


def test_a_column_has_one_function():
    def first(log_extra, **_):
        log_extra("mark", ["a", "b"])
        return [1.0, 1.0]

    def second(log_extra, **_):
        log_extra("own", [1, 2])
        log_extra("mark", ["c", "d"])
        return [2.0, 2.0]

    with pytest.raises(ValueError, match="'second' logs the column 'mark', which 'first' logs too"):
        call(Rewards([first, second]))
    judged = judge(Rewards([first, second], on_error="skip"))
    assert judged.errors == {"second": 2} and judged.completions[0].extras == {"mark": "a", "own": 1}
