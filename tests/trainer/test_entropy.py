"""The adaptive entropy bonus: its rule, by hand and as TRL has it, and a run that holds it through a resume."""

import json
import math

import pytest
from resumed import Crash, crash, make_trainer
from runs import lines

from fastgrpo import GRPOConfig
from fastgrpo.trainer.update import AdaptiveEntropy

pytestmark = pytest.mark.usefixtures("without_curves")

KNOBS = {"entropy_coef": 0.1, "entropy_coef_delta": 0.25, "entropy_coef_max": 0.5, "entropy_coef_min": -0.05}


def control(**changes):
    return AdaptiveEntropy(GRPOConfig(use_adaptive_entropy=True, entropy_target=1.0, **{**KNOBS, **changes}))


def test_the_coefficient_moves_between_its_bounds_and_is_applied_at_low_entropy_alone():
    entropy, seen = control(), []
    assert entropy.applied == 0.0  # nothing has been measured
    for measured in (0.5, 1.0, 0.2, 1.5, 2.0, 1.1, 0.9):
        entropy.observe(measured)
        seen.append((round(entropy.coef, 6), round(entropy.applied, 6)))
    # 0.1 + 0.25, + 0.25 up to the bound, + 0.25 at the bound; - 0.25 three times, down to the bound; + 0.25
    assert seen == [(0.35, 0.35), (0.5, 0.5), (0.5, 0.5), (0.25, 0.0), (0.0, 0.0), (-0.05, 0.0), (0.2, 0.2)]


def test_what_is_not_finite_moves_nothing_and_the_state_is_restored():
    first, second = control(), control()
    first.observe(0.5)
    for broken in (math.nan, math.inf):
        first.observe(broken)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (second.coef, second.applied) == (first.coef, first.applied) == (0.35, 0.35)


SETTINGS = {"use_adaptive_entropy": True, "entropy_coef_delta": 0.01, "entropy_target": 20.0, "logging_steps": 1}


def test_a_run_measures_every_update_and_goes_on_with_its_coefficient(tmp_path):
    """Entropies of this vocabulary are below the target of 20 nats, so that the coefficient rises with each update."""
    make_trainer(tmp_path, "whole", **SETTINGS).train()
    with pytest.raises(Crash):
        make_trainer(tmp_path, "crashed", reward=crash(5), **SETTINGS).train()
    make_trainer(tmp_path, "crashed", resume_from_checkpoint="auto", **SETTINGS).train()
    runs = [[row for row in lines(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in ("whole", "crashed")]
    updates = 2  # passes over a rollout
    for i, row in enumerate(runs[0], 1):
        assert row["entropy_coef"] == pytest.approx(0.01 * updates * i) and row["entropy"] > 0
    assert [row["entropy_coef"] for row in runs[0]] == [row["entropy_coef"] for row in runs[1]]
    assert [row["loss"] for row in runs[0]] == [row["loss"] for row in runs[1]]
