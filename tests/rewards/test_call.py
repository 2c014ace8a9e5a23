"""Reward functions: how they are called, named, weighted and checked."""

import asyncio
import copy
import dataclasses
import math
from functools import partial

import pytest
import torch
from samples import answer

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.records import Prompt, TrainerState
from fastgrpo.loss.advantages import group_advantages
from fastgrpo.rewards.call import Rewards, reward_matrix

PROMPTS = [Prompt([1], "p0", {"answer": "x"}), Prompt([2], "p1", {"answer": "y", "hint": 7})]


COMPLETIONS = [
    answer(prompt, ids, content) for prompt, ids, content in zip(PROMPTS, ([3], [4, 5]), ("c0", "c1"), strict=True)
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
    assert callable(seen.pop("log_metric")) and callable(seen.pop("log_extra")) and callable(seen.pop("log_steps"))
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


def test_every_name_of_a_column_works():
    """`function` is common in data of function calls; `completion` holds the references of other trainers."""
    columns = {"function": "f", "arguments": "a", "call": "c", "completion": "theirs", "not a name": 1}

    def reward(**given):
        assert {name: given[name] for name in columns} == {name: [value] * 2 for name, value in columns.items()}
        assert given["completions"] == ["c0", "c1"]
        return [0.0, 0.0]

    judge(Rewards([reward]), [dataclasses.replace(c, columns=columns) for c in COMPLETIONS])


def test_what_functions_get_are_copies_made_for_each_of_them():
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


@pytest.mark.parametrize(
    "result, match",
    [
        ([1.0], "'reward' returned 1 rewards for 2 completions"),
        ([1.0, "good"], "'reward' returned 'good' for completion 1"),
        ([math.nan, 1.0], "'reward' returned nan for completion 0"),
        ([1.0, math.inf], "'reward' returned inf for completion 1"),
        (7.0, "'reward' returned 7.0, not a list"),
        ({"c0": 1.0, "c1": 2.0}, "'reward' returned {'c0': 1.0, 'c1': 2.0}, not a list but of type dict"),
        ({1.0, 2.0}, "'reward' returned {1.0, 2.0}, not a list but of type set"),
        ("10", "'reward' returned '10', not a list but of type str"),
        (RuntimeError("down"), r"'reward' returned RuntimeError\('down'\), not a list but of type RuntimeError"),
        ([10**400, 1.0], "'reward' returned 1000+ for completion 0, not a finite number from -3.4e"),
        ([1.0, -1e200], r"'reward' returned -1e\+200 for completion 1, not a finite number from -3.4e"),
        ([1.0, None, 2.0], "'reward' returned 3 rewards for 2 completions"),
        ([None, None], "all rewards are None: reward gave none of 2 completions a reward"),
    ],
)
def test_bad_results_are_named(result, match):
    def reward(**_):
        return result

    with pytest.raises(ValueError, match=match):
        call(Rewards([reward]))
    assert call(Rewards([reward], on_error="skip")).isnan().any()


def test_an_exception_is_named_with_its_place_and_sample():
    def reward(completions, **columns):
        return [columns["solution"]]

    with pytest.raises(ValueError, match=r"'reward' raised KeyError: 'solution' \(.*test_call.py:\d+\)") as error:
        call(Rewards([reward]))
    told, sample = str(error.value).splitlines()
    assert "the row has the columns answer" in told and "--reward_errors skip" in told
    assert sample == "  in a call of 2 completions, the first of them on the prompt 'p0', completion 'c0'"
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


class Judge:
    def __call__(self, completions, **_):
        return [1.0] * len(completions)


def test_functions_of_one_name_are_told_apart():
    def made(value):
        def near(completions, **_):
            return [value] * len(completions)

        return near

    def near_2(completions, **_):
        return [0.0] * len(completions)

    rewards = Rewards([made(1.0), made(2.0), near_2, made(3.0), Judge(), Judge(), partial(near_2)])
    assert rewards.names == ["near", "near_2", "near_2_2", "near_3", "Judge", "Judge_2", "near_2_3"]
    assert list(judge(rewards).completions[0].rewards.values()) == [1.0, 2.0, 0.0, 3.0, 1.0, 1.0, 0.0]


def test_a_column_has_one_function():
    def first(log_extra, log_metric, **_):
        log_metric("seconds", 1)
        log_extra("mark", ["a", "b"])
        return [1.0, 1.0]

    def second(log_extra, log_metric, **_):
        log_metric("seconds", 2)
        log_extra("mark", ["c", "d"])
        log_extra("own", [1, 2])
        return [2.0, 2.0]

    with pytest.raises(ValueError, match="'second' logs the column 'mark', which 'first' logs too; choose another"):
        call(Rewards([first, second]))
    judged = judge(Rewards([first, second], on_error="skip"))
    assert judged.errors == {"second": 2} and judged.logged == {"seconds": [1, 2]}
    assert judged.completions[0].extras == {"mark": "a", "own": 1}
    assert judged.completions[0].rewards["first"] == 1.0 and math.isnan(judged.completions[0].rewards["second"])


def test_a_fault_in_what_is_logged_is_a_failure_of_the_function():
    def spread(log_metric, **_):
        log_metric("spread", None)
        return [1.0, 1.0]

    with pytest.raises(ValueError, match=r"'spread' raised ValueError: log_metric\('spread', ...\) takes .*, got None"):
        call(Rewards([spread]))
    judged = judge(Rewards([spread], on_error="skip"))
    assert judged.errors == {"spread": 2} and not judged.logged


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), asyncio.CancelledError()])
def test_no_exception_but_an_interrupt_ends_the_run(error):
    def plain(**_):
        raise error

    async def later(**_):
        raise error

    def lazily(**_):
        yield 1.0
        raise error

    for function in (plain, later, lazily):
        told = rf"'{function.__name__}' raised {type(error).__name__}.*\(.*test_call.py:\d+\)"
        with pytest.raises(ValueError, match=told):
            call(Rewards([function]))
        judged = judge(Rewards([function, Judge()], on_error="skip"))
        assert judged.errors == {function.__name__: 2}
        assert judged.completions[0].rewards["Judge"] == 1.0


def test_the_largest_rewards_and_weights_overflow_no_statistic():
    def large(**_):
        return [3.4e38, -3.4e38]

    weights = GRPOConfig(reward_weights=[3.4e38, 3.4e38]).reward_weights
    rewards = Rewards([large, large], weights)
    total = rewards.total(call(rewards))
    assert group_advantages(total, 2).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
