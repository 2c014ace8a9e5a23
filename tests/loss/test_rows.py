"""Rows without effect: masked, without weight or without advantage. Their content is never read."""

import math
from dataclasses import replace

import pytest
import torch
from objective_cases import LOSS_TYPES
from oracle import make_case, run, truth

from fastgrpo import grpo_loss, linear_grpo_loss


def test_log_probs_and_weights_of_masked_rows_are_not_read():
    case = make_case()
    logps = torch.randn(16).masked_fill(~case.mask, math.nan).requires_grad_()
    weights = torch.rand(16).masked_fill(~case.mask, math.nan)
    rest = {"mask": case.mask, "ref_logps": case.ref_logps, "beta": 0.1, "token_weights": weights}
    output = grpo_loss(logps, None, case.advantages, **rest)
    output.loss.backward()
    assert output.loss.isfinite() and logps.grad.isfinite().all() and (logps.grad[~case.mask] == 0).all()


@pytest.mark.parametrize("why", ["weight", "advantage"])
def test_rows_of_no_weight_or_no_advantage_are_not_read(why):
    """They still count in the normalizer."""
    case = make_case(masked=0.0)
    drop = torch.arange(16) % 3 == 0
    spoilt = {"hidden": case.hidden.clone(), "targets": case.targets.masked_fill(drop, -100)}
    spoilt["hidden"][drop] = math.nan
    weights = (~drop).double() / 16 if why == "weight" else None
    if why == "advantage":
        case = replace(case, advantages=case.advantages.masked_fill(drop, 0))
    loss, _, _, gradients = truth(case, weights=weights)
    output, actual = run(replace(case, **spoilt), linear_grpo_loss, token_weights=weights)
    assert torch.equal(output.active, ~drop) and output.metrics["active_tokens"].item() == (~drop).sum()
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(actual, gradients)


def test_rows_of_no_advantage_are_read_where_the_kl_needs_them():
    case = replace(make_case(masked=0.0), advantages=torch.zeros(16).double())
    loss, _, metrics, gradients = truth(case, beta=0.1)
    output, actual = run(case, linear_grpo_loss, beta=0.1)
    assert output.active.all() and output.loss.item() == pytest.approx(0.1 * metrics["kl"].item())
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(actual, gradients)


@pytest.mark.parametrize("name", ["hidden", "old_logps", "ref_logps"])
def test_nan_in_an_active_row_makes_the_loss_nan(name):
    """A trainer skips such an update, and may go on."""
    case = make_case(masked=0.0)
    spoilt = getattr(case, name).clone()
    spoilt[3] = math.nan
    output, gradients = run(replace(case, **{name: spoilt}), linear_grpo_loss, beta=0.1)
    assert output.loss.isnan()
    if name == "hidden":
        assert gradients["weight"].isnan().any() and gradients["hidden"][3].isnan().all()


@pytest.mark.parametrize("name", [*LOSS_TYPES, "gspo"])
def test_nan_makes_the_loss_nan_where_the_ratio_is_1(name):
    """The first update of a rollout has no old log-probs."""
    case = replace(make_case(masked=0.0), old_logps=None)
    case.hidden[3] = math.nan
    output, _ = run(case, linear_grpo_loss, **(LOSS_TYPES | COUPLED)[name])
    assert output.loss.isnan()


# knobs that look at whole sequences
COUPLED = {
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "sequence-sampler": {"sampler_logps": -torch.ones(6)},
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("rows", [[0, 3, 4, 5], [0, 1, 2, 3, 4, 5]])
def test_rows_hold_whole_sequences_where_the_objective_looks_at_them(name, rows):
    """Otherwise a part of a sequence would count as the whole. The third of six tokens is masked."""

    def loss_of(rows, **knobs):
        given = {"mask": torch.arange(6) != 2, "cu_seqlens": [0, 3, 6], "old_logps": -torch.ones(6)}
        rows = torch.tensor(rows, dtype=torch.long)
        return grpo_loss(-torch.ones(6), advantages=torch.ones(6), rows=rows, **given, **knobs).loss

    with pytest.raises(ValueError, match=r"^mask must select the tokens in rows"):
        loss_of(rows, **COUPLED[name])
    assert loss_of(rows).isfinite()  # where each token counts by itself, any rows are legal
    for whole in ([0, 1, 3, 4, 5], [3, 4, 5], []):
        assert loss_of(whole, **COUPLED[name]).isfinite()
