"""What a step's completions say: rewards where some are missing, lengths, rates, and the lines of samples.jsonl."""

import dataclasses
import json
import math

import pytest
import tiny
import torch
from samples import answer

from fastgrpo.data.records import Prompt
from fastgrpo.data.token_text import TokenText
from fastgrpo.trainer.collect import length_metrics, logged_groups, rates, reward_metrics, sample_rows

NAN = float("nan")


def completion(length=2, reason="stop", right=1.0, style=0.5, advantage=0.0, **changes):
    rewards = {"right": right, "style": style}
    return answer(
        Prompt([1], "1+1="), list(range(length)), "2", reason=reason, rewards=rewards, advantage=advantage, **changes
    )


def test_rewards_that_were_not_given_are_left_out_of_the_means():
    group = [completion(advantage=1.0), completion(right=0.0, style=NAN, advantage=-1.0)]
    flat = [completion(right=NAN, style=NAN), completion(right=1.0, style=NAN)]
    values = reward_metrics(group + flat, torch.tensor([1.5, 0.0, NAN, 1.0], dtype=torch.float64), [True, False])
    assert values["reward"] == pytest.approx(2.5 / 3)
    assert values["reward_std"] == pytest.approx(1.5 / math.sqrt(2))  # of the group that both rewards were given for
    assert values["accuracy"] == 0.5  # a completion without a verdict is not right
    assert values["rewards/right/mean"] == pytest.approx(2 / 3)
    assert values["rewards/right/std"] == pytest.approx(math.sqrt(2) / 3)
    assert (values["rewards/style/mean"], values["rewards/style/std"]) == (0.5, 0.0)
    assert (values["frac_informative"], values["frac_reward_zero_std"]) == (0.5, 0.5)
    assert (values["advantage/mean"], values["advantage/abs_mean"]) == (0.0, 0.5)


def test_what_nothing_was_given_for_is_absent():
    values = reward_metrics([completion(style=NAN)] * 2, torch.tensor([NAN, NAN], dtype=torch.float64), [False])
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
    tokenizer = tiny.tokenizer()
    ids = [*tokenizer("é!")["input_ids"], tokenizer.eos_token_id]
    trained = dataclasses.replace(
        completion(style=NAN, advantage=-1), ids=ids, logps=torch.tensor([-0.5, -1 / 3, 0, -2]),
        ratios=torch.tensor([1.0, 0.5, 2.00004, 1.0]), clipped=torch.tensor([False, True, True, False]),
    )  # fmt: skip
    rows = sample_rows(7, 1, [trained, completion(extras={"answer": 2})], TokenText(tokenizer))
    lines = [json.loads(json.dumps(row)) for row in rows]
    assert lines[0] == {
        "step": 7,
        "group": 1,
        "prompt": "1+1=",
        "completion": "2",
        "rewards": {"right": 1.0, "style": None},
        "advantage": -1,
        "finish_reason": "stop",
        "tokens": 4,
        "clipped": 0.5,
        "token_ends": [0, 1, 2, 2],
        "logps": [-0.5, -0.3333, 0.0, -2.0],
        "ratios": [1.0, 0.5, 2.0, 1.0],
        "clipped_tokens": [1, 2],
    }
    assert lines[1]["answer"] == 2 and not {"ratios", "clipped_tokens"} & {*lines[1]} and lines[1]["clipped"] == 0


@pytest.mark.parametrize(
    ("groups", "most", "kept"),
    [(4, 64, [0, 1, 2, 3]), (32, 64, [0, 4, 8, 12, 16, 20, 24, 28]), (3, 16, [0, 1]), (5, 1, [0]), (10, 31, [0, 3, 6])],
)
def test_samples_are_whole_groups_evenly_spread(groups, most, kept):
    assert logged_groups(groups, 8, most) == kept
