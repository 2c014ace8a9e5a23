"""Terms that TRL and Liger share: what is computed with ours in their place is the same."""

import dataclasses
import math

import pytest
import torch

from fastgrpo import Objective, grpo_loss
from fastgrpo.integrations.terms import READ, cap_below_1, shared_log_weights, vespo_knobs

CAP = 0.6
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


def test_fields_that_surrogates_read_exist():
    fields = {field.name for field in dataclasses.fields(Objective)}
    assert {name for names in READ.values() for name in names} <= fields


def test_lambda_of_vespo_is_held_above_its_smallest_value():
    knobs = vespo_knobs({"vespo_k_pos": 0.0, "vespo_lambda_pos": 0.0, "vespo_lambda_neg": 1.5})
    objective = Objective(loss_type="vespo", **knobs)
    assert (objective.vespo_k_pos, objective.vespo_lambda_pos, objective.vespo_lambda_neg) == (0.0, 1e-4, 1.5)
    assert objective.importance_sampling_clip_max is None


@pytest.mark.parametrize("ratio", [torch.rand(3, 3) + 0.5, torch.rand(3, 1) + 0.5], ids=["tokens", "sequences"])
def test_the_product_of_shared_weights_is_that_of_the_weights(ratio):
    shared = shared_log_weights(ratio, MASK)
    assert shared.shape == (3, 1)
    torch.testing.assert_close((shared * MASK).sum(1).exp()[:2], ratio.prod(1)[:2])
    assert shared_log_weights(torch.zeros(3, 1), MASK).isfinite().all()


@pytest.mark.parametrize("correct_kl", [False, True])
def test_a_cap_below_1_is_one_of_1_for_other_advantages(correct_kl):
    logps = torch.tensor([-1.0, -2.0, -3.0, -0.5], dtype=torch.float64, requires_grad=True)
    old, ref, advantages = logps.detach() + torch.tensor([0.9, 0.2, -0.4, 0.0]), logps.detach() - 0.3, torch.ones(4)
    ratio = (logps.detach() - old).exp()
    assert 0 < (ratio > CAP).sum() < 4
    given = Objective("cispo", epsilon_high=1.0, beta=0.2, use_bias_correction_kl=correct_kl)
    objective, gains, moved = cap_below_1(CAP, given, advantages, old)
    (found,) = torch.autograd.grad(grpo_loss(logps, moved, gains, ref_logps=ref, objective=objective).loss, logps)
    kl = (ref - logps).exp() - (ref - logps) - 1
    kl = kl * (logps - old).exp() if correct_kl else kl
    (expected,) = torch.autograd.grad((0.2 * kl - ratio.clamp(max=CAP) * advantages * logps).mean(), logps)
    torch.testing.assert_close(found, expected)
    first, gains, none = cap_below_1(CAP, given, advantages, None)
    assert first == given and none is None and gains.tolist() == pytest.approx([CAP] * 4)
    assert math.isclose((moved - old)[0], math.log(CAP))
