"""What a step's completions say: rewards where some are missing, lengths, rates, and the lines of samples.jsonl."""

import json
import math

import pytest
import torch

from fastgrpo.data.records import Completion, Prompt, Rollout
from fastgrpo.step.measure import length_metrics, rates, reward_metrics, sample_rows

NAN = float("nan")


def completion(length=2, reason="stop", right=1.0, style=0.5, advantage=0.0, **changes):
    rollout = Rollout(list(range(length)), torch.zeros(length), reason)
    rewards = {"right": right, "style": style}
    return Completion(Prompt([1], "1+1="), rollout, "2", rewards=rewards, advantage=advantage, **changes)


def test_rewards_that_were_not_given_are_left_out_of_the_means():
    group = [completion(advantage=1.0), completion(right=0.0, style=NAN, advantage=-1.0)]
    flat = [completion(right=NAN, style=NAN), completion(right=1.0, style=NAN)]
    values = reward_metrics(group + flat, torch.tensor([1.5, 0.0, NAN, 1.0], dtype=torch.float64), 2)
    assert values["reward"] == pytest.approx(2.5 / 3)
    assert values["reward_std"] == pytest.approx(1.5 / math.sqrt(2))  # of the group that both rewards were given for
    assert values["accuracy"] == 0.5  # a completion without a verdict is not right
    assert values["rewards/right/mean"] == pytest.approx(2 / 3)
    assert values["rewards/right/std"] == pytest.approx(math.sqrt(2) / 3)
    assert (values["rewards/style/mean"], values["rewards/style/std"]) == (0.5, 0.0)
    assert (values["frac_informative"], values["frac_reward_zero_std"]) == (0.5, 0.5)
    assert (values["advantage/mean"], values["advantage/abs_mean"]) == (0.0, 0.5)


def test_what_nothing_was_given_for_is_absent():
    values = reward_metrics([completion(style=NAN)] * 2, torch.tensor([NAN, NAN], dtype=torch.float64), 2)
    assert values.keys().isdisjoint({"reward", "reward_std", "rewards/style/mean", "rewards/style/std"})
    assert not any(math.isnan(value) for value in values.values())


def test_lengths():
    assert length_metrics([completion(2), completion(6, "length"), completion(4), completion(4)]) == {
        "completions/mean_length": 4,
        "completions/min_length": 2,
        "completions/max_length": 6,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 10 / 3,
        "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 4,
    }
    assert not any("terminated" in name for name in length_metrics([completion(6, "length")]))


def test_rates():
    assert rates(40, rollout_seconds=2.0, seconds=8.0) == {
        "step_time": 8.0,
        "tokens/s": 5.0,
        "rollout/tokens/s": 20.0,
        "rollout/share": 0.25,
    }


def test_a_line_of_samples_is_a_completion():
    completions = [completion(), completion(), completion(style=NAN, extras={"answer": 2}, clipped=0.25, advantage=-1)]
    lines = [json.loads(json.dumps(row)) for row in sample_rows(7, completions, group_size=2)]
    assert [line["group"] for line in lines] == [0, 0, 1]
    assert lines[2] == {
        "step": 7,
        "group": 1,
        "prompt": "1+1=",
        "completion": "2",
        "rewards": {"right": 1.0, "style": None},
        "advantage": -1,
        "finish_reason": "stop",
        "tokens": 2,
        "clipped": 0.25,
        "answer": 2,
    }
