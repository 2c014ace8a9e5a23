"""Reward functions: how they are called, found, weighted and checked."""

import asyncio
import dataclasses
import math

import pytest
import torch

from fastgrpo.data.records import Completion, Prompt, Rollout
from fastgrpo.rewards.call import Rewards, load_reward, reward_matrix

PROMPTS = [Prompt([1], "p0", {"answer": "x"}), Prompt([2], "p1", {"answer": "y", "hint": 7})]


COMPLETIONS = [
    Completion(prompt, Rollout(ids, torch.zeros(len(ids)), "stop"), content)
    for prompt, ids, content in zip(PROMPTS, ([3], [4, 5]), ("c0", "c1"), strict=True)
]


def judge(rewards, completions=COMPLETIONS, **arguments):
    return rewards(completions, "state", **arguments)


def call(rewards, **arguments):
    """Only the rewards, [S, F]."""
    return reward_matrix(judge(rewards, **arguments).completions)


def test_called_as_trl_calls_them():
    seen = {}

    def reward(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [1, 0.5]

    assert call(Rewards([reward])).tolist() == [[1.0], [0.5]]
    assert callable(seen.pop("log_metric")) and callable(seen.pop("log_extra"))
    assert seen == {
        "prompts": ["p0", "p1"],
        "completions": ["c0", "c1"],
        "answer": ["x", "y"],
        "hint": [None, 7],
        "completion_ids": [[3], [4, 5]],
        "trainer_state": "state",
    }


def test_what_functions_log_travels_with_the_completions():
    def reward(completions, log_metric, log_extra, **_):
        log_metric("length", 2)
        log_metric("length", torch.tensor(4.0))
        log_extra("mark", torch.tensor([1, 2]))
        return [1.0, None]

    judged = judge(Rewards([reward]))
    assert judged.logged == {"length": [2.0, 4.0]} and not judged.errors
    assert [completion.extras for completion in judged.completions] == [{"mark": 1}, {"mark": 2}]
    assert judged.completions[0].rewards == {"reward": 1.0} and math.isnan(judged.completions[1].rewards["reward"])
    assert not COMPLETIONS[0].rewards  # the records that were judged stay as they were


@pytest.mark.parametrize(
    "values, match",
    [([1], r"takes one value a completion: 2, got 1"), ([{1}, {2}], "takes what JSON can hold")],
)
def test_a_column_that_cannot_be_written_is_refused(values, match):
    def reward(log_extra, **_):
        log_extra("mark", values)
        return [1.0, 1.0]

    with pytest.raises(ValueError, match=match):
        judge(Rewards([reward]))


def test_weights_and_rewards_that_were_not_given():
    def first(**_):
        return [1.0, None]

    def second(**_):
        return [10.0, None]

    rewards = Rewards([first, second], [2.0, 0.5])
    per_function = call(rewards)
    assert per_function[0].tolist() == [1.0, 10.0] and per_function[1].isnan().all()
    total = rewards.total(per_function)
    assert total[0] == 7.0 and math.isnan(total[1])
    assert rewards.total(torch.tensor([[math.nan, 4.0]])).item() == 2.0


def test_async_functions_run_together():
    order = []

    async def slow(**_):
        order.append("slow starts")
        await asyncio.sleep(0.01)
        order.append("slow ends")
        return [1, 2]

    async def quick(**_):
        order.append("quick")
        return [3, 4]

    def plain(**_):
        return [5, 6]

    assert call(Rewards([slow, plain, quick])).tolist() == [[1, 5, 3], [2, 6, 4]]
    assert order == ["slow starts", "quick", "slow ends"]


def test_async_functions_run_where_a_loop_runs_already():
    async def later(**_):
        await asyncio.sleep(0.01)
        return [1, 2]

    async def notebook():
        return call(Rewards([later]))

    assert asyncio.run(notebook()).tolist() == [[1], [2]]


def test_numpy_and_torch_scalars_are_numbers():
    def reward(**_):
        return [torch.tensor(1.5), torch.tensor(2).numpy()[()]]

    def column(**_):
        return torch.tensor([[1.5], [2.0]])

    def generator(**_):
        return map(float, ("1.5", "2"))

    for function in (reward, column, generator):
        assert call(Rewards([function])).tolist() == [[1.5], [2.0]]


@pytest.mark.parametrize(
    "result, match",
    [
        (lambda: ({}[text] for text in "ab"), r"'reward' raised KeyError: 'a' \("),
        (lambda: torch.ones(2, 2), r"'reward' returned tensor\(\[1., 1.\]\) for completion 0, not a finite number"),
        (lambda: torch.ones(2, 2).numpy(), r"'reward' returned array\(.* for completion 0, not a finite number"),
        (lambda: torch.tensor(1.0), "'reward' raised TypeError: iteration over a 0-d tensor"),
    ],
)
def test_what_fails_while_it_is_read_is_named_or_skipped(result, match):
    def reward(**_):
        return result()

    with pytest.raises(ValueError, match=match):
        call(Rewards([reward]))
    skipping = Rewards([reward], on_error="skip")
    judged = judge(skipping)
    assert reward_matrix(judged.completions).isnan().all() and judged.errors == {"reward": 2}


def test_a_data_sets_own_completions_do_not_stand_in_for_the_rollouts():
    seen = []

    def reward(completions, **columns):
        seen.append((completions, columns["answer"]))
        return [0.0, 0.0]

    prompt = Prompt([1], "p", {"completions": "theirs", "answer": "x"})
    judge(Rewards([reward]), [dataclasses.replace(completion, prompt=prompt) for completion in COMPLETIONS])
    assert seen == [(["c0", "c1"], ["x", "x"])]


@pytest.mark.parametrize(
    "result, match",
    [
        ([1.0], "'reward' returned 1 rewards for 2 completions"),
        ([1.0, "good"], "'reward' returned 'good' for completion 1"),
        ([math.nan, 1.0], "'reward' returned nan for completion 0"),
        ([1.0, math.inf], "'reward' returned inf for completion 1"),
        (7.0, "'reward' returned 7.0, not a list"),
        ([1.0, None, 2.0], "'reward' returned 3 rewards for 2 completions"),
        ([None, None], "all rewards are None: reward gave none of 2 completions a reward"),
    ],
)
def test_bad_results_are_named(result, match):
    def reward(**_):
        return result

    with pytest.raises(ValueError, match=match):
        call(Rewards([reward]))


def test_an_exception_is_named_with_its_place_and_sample():
    def reward(completions, **columns):
        return [columns["solution"]]

    with pytest.raises(ValueError, match=r"'reward' raised KeyError: 'solution' \(.*test_call.py:\d+\)") as error:
        call(Rewards([reward]))
    told, sample = str(error.value).splitlines()
    assert "the rows have the columns answer" in told and "--reward_errors skip" in told
    assert sample == "  on the prompt 'p0', completion 'c0'"
    assert isinstance(error.value.__cause__, KeyError)


def test_errors_are_skipped_and_counted():
    def good(**_):
        return [1.0, 2.0]

    def odd(**_):
        return [math.nan, 3.0]

    async def down(**_):
        raise RuntimeError("down")

    def short(**_):
        return [1.0]

    rewards = Rewards([good, odd, down, short], on_error="skip")
    for _ in range(2):  # the counts are of the last call
        judged = judge(rewards)
        assert judged.errors == {"odd": 1, "down": 2, "short": 2}
    per_function = reward_matrix(judged.completions)
    assert per_function[:, 0].tolist() == [1.0, 2.0] and per_function[1, 1] == 3.0
    assert per_function.isnan().sum(0).tolist() == [0, 1, 2, 2]
    assert rewards.total(per_function).tolist() == [1.0, 5.0]
    assert call(Rewards([down], on_error="skip")).isnan().all()
    with pytest.raises(ValueError, match="reward_errors must be one of raise, skip"):
        Rewards([good], on_error="ignore")


def test_a_module_that_fails_on_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "fails_on_import.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="cannot be imported: ZeroDivisionError: division by zero"):
        load_reward("fails_on_import:f")
    with pytest.raises(ValueError, match="'math:pi' is a float, which cannot be called"):
        load_reward("math:pi")


def test_bad_sets_are_refused():
    def f(**_):
        return []

    with pytest.raises(ValueError, match="at least one"):
        Rewards([])
    with pytest.raises(ValueError, match="names of their own"):
        Rewards([f, f])
    with pytest.raises(ValueError, match="2 entries for 1"):
        Rewards([f], [1.0, 2.0])


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
