"""What is measured: rewards where some are missing, lengths, rates, lines of samples.jsonl, losses, held-out rows."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import tiny
import torch
from samples import answer

from fastgrpo import GRPOLossOutput
from fastgrpo.data.records import Prompt
from fastgrpo.data.token_text import TokenText
from fastgrpo.trainer.collect import length_metrics, logged_groups, reward_metrics, sample_rows
from fastgrpo.trainer.update import Meter

NAN = float("nan")


def completion(length=2, reason="stop", right=1.0, style=0.5, advantage=0.0, **changes):
    changes |= {"rewards": {"right": right, "style": style}, "advantage": advantage}
    return answer(Prompt([1], "1+1="), list(range(length)), "2", reason=reason, **changes)


def test_means_ignore_rewards_of_none():
    group = [completion(advantage=-0.9), completion(right=0.0, style=NAN, advantage=-0.1)]
    flat = [completion(right=NAN, style=NAN, advantage=0.7), completion(right=1.0, style=NAN, advantage=0.3)]
    values = reward_metrics(group + flat, torch.tensor([1.5, 0.0, NAN, 1.0], dtype=torch.float64), [True, False])
    assert values["reward"] == pytest.approx(2.5 / 3)
    assert values["reward_std"] == pytest.approx(1.5 / math.sqrt(2))  # of the group with two rewards
    three = [completion(advantage=0.0) for _ in range(3)]
    values["of three"] = reward_metrics(three, torch.tensor([1.0, NAN, 0.0]).double(), [True])["reward_std"]
    assert values["of three"] == pytest.approx(math.sqrt(0.5))
    assert values["accuracy"] == 0.5  # a completion without a verdict is not right
    assert values["rewards/right/mean"] == pytest.approx(2 / 3)
    assert values["rewards/right/std"] == pytest.approx(1 / math.sqrt(3))  # TRL's, over n - 1
    assert (values["rewards/style/mean"], values["rewards/style/std"]) == (0.5, 0.0)
    assert (values["frac_informative"], values["frac_reward_zero_std"]) == (0.5, 0.5)
    assert (values["advantage/mean"], values["advantage/abs_mean"]) == (0.0, 0.5)


def test_length_metrics():
    values = length_metrics([completion(2), completion(6, "length"), completion(4), completion(4)])
    assert values.pop("completions/clipped_ratio") == 0.25
    assert [values.pop(f"completions/{of}_length") for of in ("mean", "min", "max")] == [4, 2, 6]
    assert [values.pop(f"completions/{of}_terminated_length") for of in ("mean", "min", "max")] == [10 / 3, 2, 4]
    assert not any("terminated" in name for name in length_metrics([completion(6, "length")]))


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
        "step": 7, "group": 1, "prompt": "1+1=", "completion": "2", "rewards": {"right": 1.0, "style": None},
        "advantage": -1, "finish_reason": "stop", "tokens": 4, "clipped": 0.5, "token_ends": [0, 1, 2, 2],
        "logps": [-0.5, -0.3333, 0.0, -2.0], "ratios": [1.0, 0.5, 2.0, 1.0], "clipped_tokens": [1, 2],
    }  # fmt: skip
    assert lines[1]["answer"] == 2 and not {"ratios", "clipped_tokens"} & {*lines[1]} and lines[1]["clipped"] == 0


@pytest.mark.parametrize("groups, most, kept", [(4, 64, [0, 1, 2, 3]), (5, 1, [0]), (10, 31, [0, 3, 6])])
def test_samples_are_whole_groups_evenly_spread(groups, most, kept):
    assert logged_groups(groups, 8, most) == kept


def output(loss, tokens, logps=(0.0,), **metrics):
    values = {"policy_loss": loss, "active_tokens": tokens, **metrics}
    metrics = {name: torch.tensor(float(value)) for name, value in values.items()}
    logps = torch.tensor(logps)
    return GRPOLossOutput(torch.tensor(float(loss)), logps, torch.ones_like(logps, dtype=torch.bool), metrics)


def batch(old_logps=None, rollout_logps=None):
    return SimpleNamespace(old_logps=old_logps, rollout_logps=rollout_logps)


def test_losses_are_sums_over_an_update_and_means_over_updates_that_were_not_skipped():
    meter = Meter()
    for loss, update in ((1.0, 0), (2.0, 0), (5.0, 1), (NAN, 2)):  # the first update has two micro-batches
        meter.add(output(loss, 4, kl=loss / 10), batch(), update)
    values = meter.values([0.5, 1.5, NAN])
    assert (values["loss"], values["policy_loss"], values["grad_norm"], values["skipped_updates"]) == (4.0, 4.0, 1.0, 1)
    assert values["kl"] == pytest.approx((0.1 + 0.2 + 0.5) / 3)
    assert Meter().values([0.0]) == {"skipped_updates": 0, "grad_norm": 0.0, "loss": 0.0, "policy_loss": 0.0}
    assert Meter().values([NAN, NAN]) == {"skipped_updates": 2}


def test_means_are_weighted_by_active_tokens_and_extremes_are_not():
    meter, names = Meter(), ("kl", "ratio/mean", "ratio/max", "clip_ratio/low_mean", "clip_ratio/high_mean")
    for tokens, told in ((1, (0.4, 1.0, 1.5, 0.25, 0.5)), (3, (0.8, 2.0, 1.2, 0.25, 0.5))):
        meter.add(output(0.0, tokens, **dict(zip(names, told, strict=True))), batch(), 0)
    values = meter.values([1.0])
    assert values["kl"] == pytest.approx(0.7) and values["ratio/mean"] == pytest.approx(1.75)
    assert values["ratio/max"] == 1.5 and "active_tokens" not in values
    assert values["clip_ratio/region_mean"] == 0.75  # a token is clipped at one bound or the other


def test_compares_log_probs_of_the_rollout_only_on_the_first_update():
    meter, drawn = Meter(), torch.tensor([-1.0, -2.0])
    meter.add(output(0.0, 2, (-1.0, -2.5)), batch(rollout_logps=drawn), 0)
    meter.add(output(0.0, 2, (-9.0, -9.0)), batch(old_logps=drawn, rollout_logps=drawn), 1)
    values = meter.values([1.0, 1.0])
    assert values["sampler/logp_gap_mean"] == 0.25 and values["sampler/logp_gap_max"] == 0.5
    assert values["sampler/kl"] == pytest.approx((math.exp(-0.5) - 0.5) / 2)
