"""Gradients are clipped, an update that is not finite moves nothing, and the entropy bonus adapts."""

import math

import pytest
import tiny
import torch
from runs import PROMPTS, lines, make_trainer, samples_of

from fastgrpo import GRPOConfig
from fastgrpo.policy.model import Policy
from fastgrpo.trainer.optim import MasterAdamW, make_schedule
from fastgrpo.trainer.update import AdaptiveEntropy, Learner

pytestmark = pytest.mark.usefixtures("without_curves")


def updater_of(max_grad_norm=0.5):
    """A tiny policy, and a learner over it that warms up for four updates."""
    model = tiny.model()
    optimizer = MasterAdamW(model, learning_rate=1e-2)
    schedule = make_schedule(optimizer, "constant_with_warmup", warmup_steps=4, total_steps=10)
    return model, Learner(Policy.of(model), optimizer, schedule, max_grad_norm=max_grad_norm, max_tokens=1000)


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def sum_over_completions(model):
    head = model.get_output_embeddings().weight
    return lambda part, batch: (head[batch.targets] ** 2).sum() * 0.1


def test_reports_the_norm_before_clipping():
    norms = []
    for bound in (1e-3, 1e3):
        model, learner = updater_of(max_grad_norm=bound)
        masters, clipped = learner.optimizer.masters, []

        def look(*_, masters=masters, clipped=clipped):
            gradients = [master.grad for master in masters if master.grad is not None]
            clipped.append(torch.nn.utils.get_total_norm(gradients).item())

        learner.optimizer.adamw.register_step_pre_hook(look)
        norms.append(learner.step(samples_of(), sum_over_completions(model))[0])
        assert clipped == [pytest.approx(min(bound, norms[0].item()), rel=1e-3)]
    torch.testing.assert_close(*norms)
    assert norms[0] > 1e-2
    before = weights_of(model)
    assert learner.step([], sum_over_completions(model)) == (0, None) and not torch.equal(weights_of(model), before)


@pytest.mark.parametrize("bad", [lambda h: torch.nan, lambda h: torch.inf, lambda h: (h - h.detach()).sum().sqrt()])
def test_non_finite_updates_change_no_weights_and_the_schedule_continues(bad):
    model, learner = updater_of()
    optimizer, loss = learner.optimizer, sum_over_completions(model)
    learner.step(samples_of(), loss)

    def state():
        tensors = [*model.parameters(), *optimizer.masters]
        tensors += [tensor for master in optimizer.masters for tensor in optimizer.adamw.state[master].values()]
        return [tensor.detach().clone() for tensor in tensors]

    before, rate = state(), learner.schedule.get_last_lr()[0]
    spoilt = bad(model.get_output_embeddings().weight)
    assert learner.step(samples_of(), lambda part, batch: spoilt + loss(part, batch))[0].isnan()
    assert all(torch.equal(*pair) for pair in zip(before, state(), strict=True))
    assert learner.schedule.get_last_lr()[0] > rate
    assert learner.step(samples_of(), loss)[0].isfinite()
    assert not all(torch.equal(*pair) for pair in zip(before, state(), strict=True))


def test_the_coefficient_stays_in_bounds_and_applies_only_at_low_entropy():
    knobs = {"entropy_coef": 0.1, "entropy_coef_delta": 0.25, "entropy_coef_max": 0.5, "entropy_coef_min": -0.05}
    entropy, seen = AdaptiveEntropy(GRPOConfig(use_adaptive_entropy=True, entropy_target=1.0, **knobs)), []
    assert entropy.applied == 0.0  # nothing has been measured
    for measured in (0.5, math.nan, math.inf, 1.0, 0.2, 1.5, 2.0, 1.1, 0.9):
        entropy.observe(measured)
        seen.append((round(entropy.coef, 6), round(entropy.applied, 6)))
    # 0.1 + 0.25, no change twice, + 0.25 up to the bound and at it; - 0.25 three times, down to the bound; + 0.25
    assert seen == [(0.35, 0.35)] * 3 + [(0.5, 0.5), (0.5, 0.5), (0.25, 0.0), (0.0, 0.0), (-0.05, 0.0), (0.2, 0.2)]


def test_a_run_measures_every_update(tmp_path):
    """Entropies of this vocabulary are below the target of 20 nats, so that the coefficient rises with each update."""
    settings = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.01, "entropy_target": 20.0,
                "num_iterations": 2}  # fmt: skip
    make_trainer(tmp_path, eval_rows=PROMPTS, eval_on_start=True, **settings).train()
    assert lines(tmp_path / "run")[0]["eval/loss"] == 0  # no update has been measured
    rows = [row for row in lines(tmp_path / "run") if "loss" in row]
    assert [row["entropy_coef"] for row in rows] == pytest.approx([0.12, 0.14])
    assert all(row["entropy"] > 0 for row in rows)
