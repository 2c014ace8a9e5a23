"""The public losses: numbers by hand, gradients by finite differences, equality with kernels/reference.py."""

import math
from dataclasses import replace
from itertools import product

import oracle
import pytest
import torch

from fastgrpo import Objective, grpo_loss, linear_grpo_loss
from fastgrpo.kernels import reference


def test_loss_gradient_and_metrics_by_hand():
    """Row 0: ratio 5/4 above 6/5 with A = 1, so the clip holds it. Row 1: ratio 3/2 with A = -2, so it flows."""
    hidden, weight, targets = oracle.hand_case()
    output = linear_grpo_loss(
        hidden,
        weight,
        targets,
        torch.tensor([1.0, -2.0]),
        old_logps=torch.tensor([math.log(0.4), math.log(0.2 / 1.5)]),
        ref_logps=torch.tensor([math.log(0.25), math.log(0.4)]),
        beta=0.1,
    )
    output.loss.backward()
    kl = [0.5 - math.log(0.5) - 1, 2 - math.log(2) - 1]  # e^d - d - 1 with d = ln(1/2) and ln 2
    loss = 0.5 * (-1.2 + 0.1 * kl[0]) + 0.5 * (3.0 + 0.1 * kl[1])
    assert output.loss.item() == pytest.approx(loss)
    assert output.logps.tolist() == pytest.approx([-math.log(2), -math.log(5)])
    assert output.active.tolist() == [True, True]
    expected = {
        "policy_loss": 0.5 * -1.2 + 0.5 * 3.0,
        "kl": (kl[0] + kl[1]) / 2,
        "ratio/mean": 1.375,
        "ratio/max": 1.5,
        "clip_ratio/low_mean": 0,
        "clip_ratio/high_mean": 0.5,
        "active_tokens": 2,
    }
    assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(expected)
    # dloss/dlogp: row 0 has the KL alone, (1/2)(0.1)(1 - 1/2); row 1 (1/2)(2 * 3/2 + 0.1 (1 - 2)).
    g0, g1 = 0.025, 1.45
    dz0, dz1 = (0.5 * g0, -0.25 * g0, -0.25 * g0), (-0.2 * g1, -0.6 * g1, 0.8 * g1)
    assert hidden.grad.flatten().tolist() == pytest.approx([dz0[0], dz0[1], dz1[0], dz1[1]], rel=1e-5)
    expected = [[a * math.log(2), b * math.log(3)] for a, b in zip(dz0, dz1, strict=True)]
    assert weight.grad.flatten().tolist() == pytest.approx([x for row in expected for x in row], rel=1e-5)


def loss_of_ratio(ratio, advantage, **knobs):
    """(loss, dloss/dlogp, metrics) of one token."""
    logps = torch.tensor([0.0], requires_grad=True)
    output = grpo_loss(logps, torch.tensor([-math.log(ratio)]), torch.tensor([advantage]), **knobs)
    output.loss.backward()
    return output.loss.item(), logps.grad.item(), output.metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "knobs", "loss", "gradient"),
    [
        (1.1, 2.0, {}, -2.2, -2.2),  # within the clip: -rA and its derivative -rA
        (1.5, 2.0, {}, -2.4, 0.0),  # high clip
        (1.25, 2.0, {"epsilon_high": 0.28}, -2.5, -2.5),  # clip-higher
        (0.5, 2.0, {}, -1.0, -1.0),  # the clip is one-sided
        (0.5, -2.0, {}, 1.6, 0.0),  # low clip
        (1.5, -2.0, {}, 3.0, 3.0),
        (1.5, -2.0, {"delta": 1.3}, 2.6, 0.0),  # the upper bound on the unclipped ratio
        (1.25, -2.0, {"delta": 1.3}, 2.5, 2.5),
        (1.5, 2.0, {"delta": 1.1}, -2.2, 0.0),  # delta below 1 + epsilon_high
        (1.5, 0.0, {}, 0.0, 0.0),
    ],
)
def test_clip_by_hand(ratio, advantage, knobs, loss, gradient):
    actual_loss, actual_gradient, metrics = loss_of_ratio(ratio, advantage, **knobs)
    assert actual_loss == pytest.approx(loss, rel=1e-5, abs=1e-9)
    assert actual_gradient == pytest.approx(gradient, rel=1e-5, abs=1e-9)
    assert metrics["clip_ratio/high_mean"].item() == float(ratio > 1 + knobs.get("epsilon_high", 0.2) and advantage > 0)
    assert metrics["clip_ratio/low_mean"].item() == float(ratio < 0.8 and advantage < 0)


def test_sequence_level_by_hand():
    """Log-ratios 0.1 and 0.3: the sequence's ratio is e^0.2 = 1.2214 on both tokens, each moves it by a half."""
    logps = torch.tensor([0.1, 0.3], requires_grad=True)
    output = grpo_loss(logps, torch.zeros(2), torch.tensor([-1.0]), cu_seqlens=torch.tensor([0, 2]),
                       loss_type="grpo", importance_sampling_level="sequence")  # fmt: skip
    output.loss.backward()
    assert output.loss.item() == pytest.approx(math.exp(0.2))
    assert logps.grad.tolist() == pytest.approx([math.exp(0.2) / 2] * 2)
    assert output.metrics["ratio/max"].item() == pytest.approx(math.exp(0.2))


@pytest.mark.parametrize(
    ("kl", "value", "slope"),
    [("k1", math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, math.log(2)), ("k3", 0.5 + math.log(2) - 1, 0.5)],
)
def test_kl_estimators_by_hand(kl, value, slope):
    # ref - logp = -ln 2; with advantage 0 the KL is all there is.
    logps = torch.zeros(1, requires_grad=True)
    output = grpo_loss(logps, None, torch.zeros(1), ref_logps=torch.tensor([-math.log(2)]), beta=0.3, kl=kl)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.3 * value)
    assert output.metrics["kl"].item() == pytest.approx(value)
    assert logps.grad.item() == pytest.approx(0.3 * slope)


def check_metrics(output, metrics, note):
    """To fp32: the specification's shares of clipped tokens are fp32 means."""
    for name, value in metrics.items():
        assert output.metrics[name].item() == pytest.approx(value.item(), rel=1e-6, abs=1e-9), (note, name)


@pytest.mark.parametrize("knobs", oracle.OBJECTIVES)
def test_linear_grpo_loss(monkeypatch, knobs):
    """Each objective, with delta or not, old given or not, bias, temperature and chunks: equal to the specification.

    That is its loss, log-probs, metrics and gradients in fp64. Where the loss is a function of the head alone (old is
    given), finite differences agree too; the head with everything in it stands for the plainer ones.
    """
    for delta, old, bias, per_token, chunk in product(
        (None, 1.3), (True, False), (False, True), (False, True), (None, 4)
    ):
        note = f"{delta=} {old=} {bias=} {per_token=} {chunk=}"
        case = oracle.make_case(old=old, bias=bias, per_token_temperature=per_token)
        loss, logps, metrics, gradients = oracle.truth(case, delta=delta, **knobs)
        with monkeypatch.context() as patch:
            oracle.set_chunk(patch, chunk)
            output, actual = oracle.run(case, linear_grpo_loss, delta=delta, **knobs)
            torch.testing.assert_close(output.loss, loss, msg=note)
            torch.testing.assert_close(output.logps, torch.zeros(16).double().masked_scatter(case.mask, logps))
            assert torch.equal(output.active, case.mask), note
            check_metrics(output, metrics, note)
            for name, gradient in gradients.items():
                torch.testing.assert_close(actual[name], gradient, msg=lambda m, n=name: f"{note} {n}: {m}")  # noqa: B023
            if old and bias and per_token:
                head = case.head()

                def loss_of(*tensors, case=case, head=head, delta=delta):
                    arguments = dict(zip(head, tensors, strict=True))
                    return linear_grpo_loss(**arguments, **case.rest(), delta=delta, **knobs).loss

                assert torch.autograd.gradcheck(loss_of, list(head.values()), fast_mode=True), note


@pytest.mark.parametrize("knobs", oracle.OBJECTIVES)
def test_grpo_loss(knobs):
    """The same of the loss from log-probs."""
    for delta, old in product((None, 1.3), (True, False)):
        case = oracle.make_case(old=old)
        head = {"hidden": case.hidden, "weight": case.weight}
        logps = reference.linear_logprob(**head, targets=case.targets, temperature=case.temperature)
        logps.requires_grad_()
        expected = logps.detach().clone().requires_grad_()
        keep = case.mask.nonzero()[:, 0]
        objective = Objective(delta=delta, **knobs)
        loss, metrics = reference.policy_loss(
            expected[keep],
            case.old_logps[keep] if old else None,
            case.ref_logps[keep],
            case.advantages[keep],
            objective.token_weights(case.mask, case.cu_seqlens, dtype=torch.float64)[keep],
            objective,
            torch.searchsorted(keep, case.cu_seqlens).diff(),
        )
        loss.backward()
        the_rest = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "ref_logps": case.ref_logps, **knobs}
        output = grpo_loss(logps, case.old_logps, case.advantages, delta=delta, **the_rest)
        output.loss.backward()
        torch.testing.assert_close(output.loss, loss.detach())
        torch.testing.assert_close(logps.grad, expected.grad)
        check_metrics(output, metrics, f"{delta=} {old=}")
        if old:
            assert torch.autograd.gradcheck(
                lambda x, case=case, delta=delta, the_rest=the_rest: (
                    grpo_loss(x, case.old_logps, case.advantages, delta=delta, **the_rest).loss
                ),
                [logps],
            )


def test_old_none_is_old_equal_to_the_current_log_probs():
    case = oracle.make_case(old=False)
    output, gradients = oracle.run(case, linear_grpo_loss)
    again, same = oracle.run(replace(case, old_logps=output.logps), linear_grpo_loss)
    assert output.metrics["ratio/max"].item() == output.metrics["ratio/mean"].item() == 1.0
    torch.testing.assert_close(again.loss, output.loss)
    torch.testing.assert_close(same, gradients)


def test_num_items_in_batch_and_token_weights_replace_the_weights():
    case = oracle.make_case()
    loss, _, _, gradients = oracle.truth(case, num_items_in_batch=100)
    output, actual = oracle.run(case, linear_grpo_loss, num_items_in_batch=100)
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(actual, gradients)
    weights = torch.rand(16)
    loss, _, _, gradients = oracle.truth(case, token_weights=weights, loss_type="grpo")
    output, actual = oracle.run(case, linear_grpo_loss, token_weights=weights, loss_type="grpo")
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(actual, gradients)
