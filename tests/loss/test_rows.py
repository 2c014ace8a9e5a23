"""Rows that cannot matter: masked, without weight or without advantage. What they hold is never read."""

import math
from dataclasses import replace

import oracle
import pytest
import torch

from fastgrpo import grpo_loss, linear_grpo_loss, linear_logprob


def poisoned(case, name, value):
    bad = ~case.mask
    tensor = getattr(case, name).clone()
    tensor[bad] = value
    return replace(case, **{name: tensor})


@oracle.CHUNKS
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", math.nan),
        ("hidden", math.inf),
        ("advantages", math.nan),
        ("old_logps", math.nan),
        ("old_logps", -math.inf),
        ("ref_logps", math.nan),
        ("temperature", math.nan),
        ("temperature", 0.0),
        ("targets", -100),
        ("targets", 10**9),
    ],
)
def test_nothing_in_a_masked_row_matters(monkeypatch, name, value, level, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(per_token_temperature=True)
    knobs = {"loss_type": "grpo", "importance_sampling_level": level, "beta": 0.1}
    expected, gradients = oracle.run(case, linear_grpo_loss, **knobs)
    output, actual = oracle.run(poisoned(case, name, value), linear_grpo_loss, **knobs)
    assert torch.equal(output.loss, expected.loss) and torch.equal(output.logps, expected.logps)
    assert torch.equal(actual["hidden"], gradients["hidden"]) and torch.equal(actual["weight"], gradients["weight"])
    assert (actual["hidden"][~case.mask] == 0).all() and (output.logps[~case.mask] == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_log_probs_of_masked_rows_in_grpo_loss(value):
    case = oracle.make_case()
    logps = torch.randn(16)
    logps[~case.mask] = value
    logps.requires_grad_()
    output = grpo_loss(logps, None, case.advantages, mask=case.mask, ref_logps=case.ref_logps, beta=0.1)
    output.loss.backward()
    assert output.loss.isfinite() and logps.grad.isfinite().all() and (logps.grad[~case.mask] == 0).all()


def test_nan_token_weights_of_masked_rows():
    case = oracle.make_case()
    weights = torch.rand(16).masked_fill(~case.mask, math.nan)
    output, gradients = oracle.run(case, linear_grpo_loss, token_weights=weights)
    assert output.loss.isfinite() and gradients["weight"].isfinite().all()


@pytest.mark.parametrize("why", ["weight", "advantage"])
def test_rows_of_no_weight_or_no_advantage_are_not_read(why):
    """NaN hidden states and illegal targets there leave no trace; the tokens still count in the normalizer."""
    case = oracle.make_case(masked=0.0)
    drop = torch.arange(16) % 3 == 0
    hidden, targets = case.hidden.clone(), case.targets.clone()
    hidden[drop], targets[drop] = math.nan, -100
    if why == "weight":
        change, knobs = {}, {"token_weights": (~drop).double() / 16}
    else:
        change, knobs = {"advantages": case.advantages.masked_fill(drop, 0)}, {}
    loss, _, _, gradients = oracle.truth(replace(case, **change), **knobs)
    output, actual = oracle.run(replace(case, hidden=hidden, targets=targets, **change), linear_grpo_loss, **knobs)
    assert torch.equal(output.active, ~drop) and output.metrics["active_tokens"].item() == (~drop).sum()
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(actual, gradients)


def test_rows_of_no_advantage_are_read_where_the_kl_needs_them():
    case = replace(oracle.make_case(masked=0.0), advantages=torch.zeros(16).double())
    loss, _, metrics, gradients = oracle.truth(case, beta=0.1)
    output, actual = oracle.run(case, linear_grpo_loss, beta=0.1)
    assert output.active.all() and output.loss.item() == pytest.approx(0.1 * metrics["kl"].item())
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(actual, gradients)


def test_a_token_of_no_weight_still_moves_the_ratio_of_its_sequence():
    case = oracle.make_case((4, 3, 5), masked=0.2)
    weights = (torch.rand(12) > 0.4).double()
    weights[4:7] = 0  # a whole sequence without weight is dropped
    knobs = {"importance_sampling_level": "sequence", "token_weights": weights, "epsilon": 0.5}
    loss, _, _, gradients = oracle.truth(case, **knobs)
    output, actual = oracle.run(case, linear_grpo_loss, **knobs)
    assert not output.active[4:7].any()
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(actual, gradients)


@oracle.CHUNKS
@pytest.mark.parametrize("knobs", oracle.OBJECTIVES)
def test_all_rows_masked(monkeypatch, knobs, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(dtype=torch.float32, bias=True)
    case = replace(case, mask=torch.zeros(16), hidden=case.hidden * math.nan, targets=case.targets * 0 - 100)
    output, gradients = oracle.run(case, linear_grpo_loss, return_entropy=True, **knobs)
    assert output.loss.item() == 0 and not output.active.any() and (output.logps == 0).all()
    assert all((gradient == 0).all() for gradient in gradients.values())
    assert all(value.item() == 0 for value in output.metrics.values())
    logps = torch.randn(16, requires_grad=True)
    the_rest = {k: v for k, v in case.rest().items() if k in ("advantages", "mask", "cu_seqlens", "ref_logps")}
    output = grpo_loss(logps, None, **the_rest, **knobs)
    output.loss.backward()
    assert output.loss.item() == 0 and (logps.grad == 0).all()


def test_batch_with_no_kept_row_and_batch_with_no_row():
    weight = torch.randn(5, 3, requires_grad=True)
    for total in (4, 0):
        hidden = torch.randn(total, 3, requires_grad=True)
        targets = torch.zeros(total, dtype=torch.long)
        output = linear_grpo_loss(hidden, weight, targets, torch.zeros(total))  # advantage 0 drops every row
        output.loss.backward()
        assert output.loss.item() == 0 and (weight.grad == 0).all() and hidden.grad.shape == (total, 3)
        logps, entropy = linear_logprob(hidden[:0], weight, targets[:0], return_entropy=True)
        assert logps.shape == entropy.shape == (0,)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rows_given_by_the_caller(level):
    case = oracle.make_case()
    knobs = {"importance_sampling_level": level, "loss_type": "grpo"}
    expected, gradients = oracle.run(case, linear_grpo_loss, **knobs)
    output, actual = oracle.run(case, linear_grpo_loss, rows=case.mask.nonzero()[:, 0], **knobs)
    assert torch.equal(output.loss, expected.loss) and torch.equal(output.active, expected.active)
    assert torch.equal(actual["hidden"], gradients["hidden"]) and torch.equal(actual["weight"], gradients["weight"])


@pytest.mark.parametrize("given", [True, False], ids=["token-weights", "loss-type"])
def test_the_mask_applies_to_rows_given_by_the_caller(given):
    """Rows that the caller lists are computed; those that the mask leaves out add nothing."""
    case = oracle.make_case()
    knobs = {"token_weights": torch.rand(16)} if given else {"loss_type": "grpo"}
    expected, gradients = oracle.run(case, linear_grpo_loss, **knobs)
    output, actual = oracle.run(case, linear_grpo_loss, rows=torch.arange(16), **knobs)
    assert output.active.all()
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(actual, gradients)


def test_nan_in_an_active_row_is_not_hidden():
    case = oracle.make_case(masked=0.0)
    hidden = case.hidden.clone()
    hidden[3] = math.nan
    output, gradients = oracle.run(replace(case, hidden=hidden), linear_grpo_loss)
    assert output.loss.isnan() and gradients["weight"].isnan().any() and gradients["hidden"][3].isnan().all()


def test_one_row():
    case = oracle.make_case((1,), bias=True)
    for knobs in ({}, {"importance_sampling_level": "sequence", "loss_type": "grpo"}):
        loss, _, _, gradients = oracle.truth(case, **knobs)
        output, actual = oracle.run(case, linear_grpo_loss, **knobs)
        torch.testing.assert_close(output.loss, loss)
        torch.testing.assert_close(actual, gradients)
