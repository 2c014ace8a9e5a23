"""The meter's means are weighted by active tokens, extremes stay extremes, and skipped updates leave no trace."""

from types import SimpleNamespace

import pytest
import torch

from fastgrpo import GRPOLossOutput
from fastgrpo.trainer.update import Meter

NAN = float("nan")


def output(loss, tokens, logps=(0.0,), **metrics):
    values = {"policy_loss": loss, "active_tokens": tokens, **metrics}
    metrics = {name: torch.tensor(float(value)) for name, value in values.items()}
    logps = torch.tensor(logps)
    return GRPOLossOutput(torch.tensor(float(loss)), logps, torch.ones_like(logps, dtype=torch.bool), metrics)


def batch(old_logps=None, rollout_logps=None):
    return SimpleNamespace(old_logps=old_logps, rollout_logps=rollout_logps)


def test_losses_are_sums_over_an_update_and_means_over_updates():
    meter = Meter()
    for loss, update in ((1.0, 0), (2.0, 0), (5.0, 1)):  # the first update has two micro-batches
        meter.add(output(loss, 4), batch(), update)
    values = meter.values([0.5, 1.5])
    assert (values["loss"], values["policy_loss"], values["grad_norm"]) == (4.0, 4.0, 1.0)


def test_means_are_weighted_by_active_tokens_and_extremes_are_not():
    meter = Meter()
    meter.add(output(0.0, 1, **{"kl": 0.4, "ratio/mean": 1.0, "ratio/max": 1.5}), batch(), 0)
    meter.add(output(0.0, 3, **{"kl": 0.8, "ratio/mean": 2.0, "ratio/max": 1.2}), batch(), 0)
    values = meter.values([1.0])
    assert values["kl"] == pytest.approx(0.7) and values["ratio/mean"] == pytest.approx(1.75)
    assert values["ratio/max"] == 1.5
    assert "active_tokens" not in values


def test_a_token_is_clipped_at_one_bound_or_the_other():
    meter = Meter()
    meter.add(output(0.0, 4, **{"clip_ratio/low_mean": 0.25, "clip_ratio/high_mean": 0.5}), batch(), 0)
    assert meter.values([1.0])["clip_ratio/region_mean"] == 0.75


def test_a_skipped_update_leaves_its_count_alone():
    meter = Meter()
    meter.add(output(1.0, 2, kl=0.1), batch(), 0)
    meter.add(output(NAN, 2, kl=NAN), batch(), 1)
    values = meter.values([2.0, NAN])
    assert values["skipped_updates"] == 1 and values["grad_norm"] == 2.0
    assert values["loss"] == 1.0 and values["kl"] == pytest.approx(0.1)
    assert Meter().values([NAN, NAN]) == {"skipped_updates": 2}


def test_without_samples_the_losses_are_0():
    assert Meter().values([0.0]) == {"skipped_updates": 0, "grad_norm": 0.0, "loss": 0.0, "policy_loss": 0.0}


def test_the_rollouts_log_probs_are_compared_on_the_first_update_alone():
    """Later the policy has moved, and its log-probs differ for that reason."""
    meter, drawn = Meter(), torch.tensor([-1.0, -2.0])
    meter.add(output(0.0, 2, (-1.0, -2.5)), batch(rollout_logps=drawn), 0)
    meter.add(output(0.0, 2, (-9.0, -9.0)), batch(old_logps=drawn, rollout_logps=drawn), 1)
    values = meter.values([1.0, 1.0])
    assert values["rollout/logp_gap"] == 0.25 and values["rollout/logp_gap_max"] == 0.5
