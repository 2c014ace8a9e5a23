"""The adaptive entropy bonus: its rule, and a run."""

import math

import pytest
from runs import lines, make_trainer

from fastgrpo import GRPOConfig
from fastgrpo.trainer.update import AdaptiveEntropy

pytestmark = pytest.mark.usefixtures("without_curves")

KNOBS = {"entropy_coef": 0.1, "entropy_coef_delta": 0.25, "entropy_coef_max": 0.5, "entropy_coef_min": -0.05}


def control(**changes):
    return AdaptiveEntropy(GRPOConfig(use_adaptive_entropy=True, entropy_target=1.0, **{**KNOBS, **changes}))


def test_the_coefficient_stays_in_bounds_and_applies_only_at_low_entropy():
    entropy, seen = control(), []
    assert entropy.applied == 0.0  # nothing has been measured
    for measured in (0.5, 1.0, 0.2, 1.5, 2.0, 1.1, 0.9):
        entropy.observe(measured)
        seen.append((round(entropy.coef, 6), round(entropy.applied, 6)))
    # 0.1 + 0.25, + 0.25 up to the bound, + 0.25 at the bound; - 0.25 three times, down to the bound; + 0.25
    assert seen == [(0.35, 0.35), (0.5, 0.5), (0.5, 0.5), (0.25, 0.0), (0.0, 0.0), (-0.05, 0.0), (0.2, 0.2)]


def test_a_non_finite_entropy_changes_nothing():
    entropy = control()
    for measured in (0.5, math.nan, math.inf):
        entropy.observe(measured)
    assert (entropy.coef, entropy.applied) == (0.35, 0.35)


def test_a_run_measures_every_update(tmp_path):
    """Entropies of this vocabulary are below the target of 20 nats, so that the coefficient rises with each update."""
    settings = {"use_adaptive_entropy": True, "entropy_coef_delta": 0.01, "entropy_target": 20.0, "num_iterations": 2}
    make_trainer(tmp_path, **settings).train()
    rows = [row for row in lines(tmp_path / "run") if "loss" in row]
    assert [row["entropy_coef"] for row in rows] == pytest.approx([0.02, 0.04])
    assert all(row["entropy"] > 0 for row in rows)
