"""The public losses and log-probs: numbers by hand, dtypes, shapes, what they return, and rows without effect."""

import math
from dataclasses import replace

import pytest
import torch
from objective_cases import BOUNDS, LOSS_TYPES
from oracle import assert_close, hand_case, make_case, padded_case, run, truth

from fastgrpo import grpo_loss, linear_grpo_loss, linear_logprob
from fastgrpo.kernels import reference


def test_loss_gradient_and_metrics_by_hand():
    """Row 0: ratio 5/4 above 6/5 with A = 1, so the clip holds it. Row 1: ratio 3/2 with A = -2, so it flows."""
    hidden, weight, targets = hand_case()
    output = linear_grpo_loss(
        hidden, weight, targets, torch.tensor([1.0, -2.0]), beta=0.1,
        old_logps=torch.tensor([math.log(0.4), math.log(0.2 / 1.5)]),
        ref_logps=torch.tensor([math.log(0.25), math.log(0.4)]),
    )  # fmt: skip
    output.loss.backward()
    kl = [0.5 - math.log(0.5) - 1, 2 - math.log(2) - 1]  # e^d - d - 1 with d = ln(1/2) and ln 2
    loss = 0.5 * (-1.2 + 0.1 * kl[0]) + 0.5 * (3.0 + 0.1 * kl[1])
    assert output.loss.item() == pytest.approx(loss)
    assert output.logps.tolist() == pytest.approx([-math.log(2), -math.log(5)])
    assert output.active.tolist() == [True, True]
    assert not any(value.requires_grad for value in (output.logps, output.active, *output.metrics.values()))
    expected = {
        "policy_loss": 0.5 * -1.2 + 0.5 * 3.0, "kl": (kl[0] + kl[1]) / 2, "ratio/mean": 1.375, "ratio/max": 1.5,
        "clip_ratio/low_mean": 0, "clip_ratio/high_mean": 0.5, "active_tokens": 2,
    }  # fmt: skip
    assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(expected)
    # dloss/dlogp: row 0 has the KL alone, (1/2)(0.1)(1 - 1/2); row 1 (1/2)(2 * 3/2 + 0.1 (1 - 2)).
    g0, g1 = 0.025, 1.45
    dz0, dz1 = (0.5 * g0, -0.25 * g0, -0.25 * g0), (-0.2 * g1, -0.6 * g1, 0.8 * g1)
    assert hidden.grad.flatten().tolist() == pytest.approx([dz0[0], dz0[1], dz1[0], dz1[1]], rel=1e-5)
    expected = [[a * math.log(2), b * math.log(3)] for a, b in zip(dz0, dz1, strict=True)]
    assert weight.grad.flatten().tolist() == pytest.approx([x for row in expected for x in row], rel=1e-5)


@pytest.mark.parametrize("kl, value, slope", [
    ("k1", math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, math.log(2)), ("k3", 0.5 + math.log(2) - 1, 0.5),
])  # fmt: skip
def test_kl_estimators_by_hand(kl, value, slope):
    # ref - logp = -ln 2; with advantage 0 the KL is all there is.
    logps = torch.zeros(1, requires_grad=True)
    output = grpo_loss(logps, None, torch.zeros(1), ref_logps=torch.tensor([-math.log(2)]), beta=0.3, kl=kl)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.3 * value)
    assert output.metrics["kl"].item() == pytest.approx(value)
    assert logps.grad.item() == pytest.approx(0.3 * slope)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_targets_and_rows_of_any_integer_type(level, dtype):
    case = make_case(dtype=torch.float32)
    knobs = {"loss_type": "grpo", "importance_sampling_level": level, "rows": case.mask.nonzero()[:, 0]}
    expected, gradients = run(case, linear_grpo_loss, **knobs)
    knobs["rows"] = knobs["rows"].to(dtype)
    output, actual = run(replace(case, targets=case.targets.to(dtype)), linear_grpo_loss, **knobs)
    assert torch.equal(output.loss, expected.loss) and torch.equal(actual["weight"], gradients["weight"])
    logps = linear_logprob(case.hidden, case.weight, case.targets.to(dtype))
    assert torch.equal(logps, linear_logprob(case.hidden, case.weight, case.targets))


@pytest.mark.parametrize("count", [0, 7, torch.tensor([7]), torch.tensor(0.0)], ids=str)
def test_num_items_in_batch_is_a_number_or_a_tensor_with_one(count):
    """transformers' Trainer makes it one-dimensional for several GPUs. A step without tokens counts as one."""
    case, knobs = make_case(), {"entropy_coef": 0.1}
    loss, _, _, gradients = truth(case, num_items_in_batch=int(count), **knobs)
    output, actual = run(case, linear_grpo_loss, num_items_in_batch=count, **knobs)
    assert output.loss.shape == ()
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(actual, gradients)


def test_sampler_metrics_and_unknown_log_probs():
    case = padded_case()
    case.sampler_logps[0, 0] = torch.nan
    out, _ = run(case, linear_grpo_loss, importance_sampling_mode="token_truncate", **BOUNDS)
    gap = (case.old_logps - case.sampler_logps)[out.active]
    weights = gap.nan_to_num(0).exp().clamp(0.8, 1.3)
    for name, expected in (("min", weights.min()), ("mean", weights.mean()), ("max", weights.max())):
        assert_close(out.metrics[f"sampling/importance_sampling_ratio/{name}"], expected, 1e-12)
    assert_close(out.metrics["sampling/sampling_logp_difference/mean"], gap.abs().nanmean(), 1e-12)
    assert_close(out.metrics["sampling/sampling_logp_difference/max"], gap.abs().nan_to_num(0).max(), 1e-12)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 3), ()], ids=str)
def test_linear_logprob_takes_any_leading_shape(shape):
    hidden, weight = torch.randn(*shape, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets, temperature = torch.randint(9, shape), torch.rand(shape) + 0.5
    logps, entropy = linear_logprob(hidden, weight, targets, temperature=temperature, return_entropy=True)
    (logps.sum() + entropy.sum()).backward()
    assert logps.shape == entropy.shape == shape and hidden.grad.shape == hidden.shape
    flat = (hidden.reshape(-1, 4), weight, targets.reshape(-1))
    torch.testing.assert_close(logps.reshape(-1), reference.linear_logprob(*flat, temperature=temperature.reshape(-1)))


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


@pytest.mark.parametrize("name", ["hidden", "old_logps", "ref_logps"])
def test_nan_in_an_active_row_makes_the_loss_nan(name):
    case = make_case(masked=0.0)
    spoilt = getattr(case, name).clone()
    spoilt[3] = math.nan
    output, gradients = run(replace(case, **{name: spoilt}), linear_grpo_loss, beta=0.1)
    assert output.loss.isnan()
    if name == "hidden":
        assert gradients["weight"].isnan().any() and gradients["hidden"][3].isnan().all()


@pytest.mark.parametrize("name", [*LOSS_TYPES, "gspo"])
def test_nan_makes_the_loss_nan_where_the_ratio_is_1(name):
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
    def loss_of(rows, **knobs):
        given = {"mask": torch.arange(6) != 2, "cu_seqlens": [0, 3, 6], "old_logps": -torch.ones(6)}
        rows = torch.tensor(rows, dtype=torch.long)
        return grpo_loss(-torch.ones(6), advantages=torch.ones(6), rows=rows, **given, **knobs).loss

    with pytest.raises(ValueError, match=r"^mask must match rows exactly"):
        loss_of(rows, **COUPLED[name])
    assert loss_of(rows).isfinite()  # where each token counts by itself, any rows are legal
    for whole in ([0, 1, 3, 4, 5], [3, 4, 5], []):
        assert loss_of(whole, **COUPLED[name]).isfinite()
