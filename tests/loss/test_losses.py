"""The public losses: numbers by hand, gradients by finite differences, equality with kernels/reference.py, layouts."""

import math
from dataclasses import replace
from itertools import product

import oracle
import pytest
import torch

import fastgrpo.loss.checks
from fastgrpo import GRPOLossOutput, Objective, grpo_loss, linear_grpo_loss, linear_logprob
from fastgrpo.kernels import reference

KNOBS = {"none": {"beta": 0.0}, "k1": {"kl": "k1"}, "k2": {"kl": "k2"}, "k3": {"kl": "k3"}}
OBJECTIVES = [
    pytest.param({"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1, **KNOBS[kl]},
                 id=f"{loss_type}-{level}-{kl}")
    for loss_type, level, kl in product(("grpo", "bnpo", "dapo", "dr_grpo"), ("token", "sequence"), KNOBS)
]  # fmt: skip


def with_length(knobs):
    return {**knobs, "max_completion_length": 8} if knobs["loss_type"] == "dr_grpo" else knobs


# ------------------------------------------------------------------------------------------------ numbers by hand


def hand_case():
    """Logits (ln 2, 0, 0) and (0, ln 3, 0): probabilities (1/2, 1/4, 1/4) and (1/5, 3/5, 1/5)."""
    hidden = torch.tensor([[math.log(2), 0.0], [0.0, math.log(3)]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], requires_grad=True)
    return hidden, weight, torch.tensor([0, 2])


def test_log_probs_and_entropy_by_hand():
    logps, entropy = linear_logprob(*hand_case(), return_entropy=True)
    assert logps.tolist() == pytest.approx([-math.log(2), -math.log(5)])
    assert entropy.tolist() == pytest.approx(
        [0.5 * math.log(2) + 0.5 * math.log(4), 0.4 * math.log(5) + 0.6 * math.log(5 / 3)]
    )


def test_temperature_by_hand():
    # At temperature 1/2 the odds are squared: (4, 1, 1) and (1, 9, 1).
    logps = linear_logprob(*hand_case(), temperature=0.5)
    assert logps.tolist() == pytest.approx([math.log(4 / 6), math.log(1 / 11)])


def test_bias_by_hand():
    # Odds (2, 1, 1) and (1, 3, 1) times (1, 2, 3).
    logps = linear_logprob(*hand_case(), bias=torch.tensor([0.0, math.log(2), math.log(3)]))
    assert logps.tolist() == pytest.approx([math.log(2 / 7), math.log(3 / 10)])


def test_loss_gradient_and_metrics_by_hand():
    """Row 0: ratio 5/4 above 6/5 with A = 1, so the clip holds it. Row 1: ratio 3/2 with A = -2, so it flows."""
    hidden, weight, targets = hand_case()
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


# ------------------------------------------------------------------------------------------ against the specification


@pytest.mark.parametrize("chunk", [None, 3], ids=["one-chunk", "chunks"])
@pytest.mark.parametrize("per_token", [False, True], ids=["T-float", "T-tensor"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_linear_logprob(monkeypatch, bias, per_token, chunk):
    """Values as the specification's; gradients by finite differences, of log-probs and entropy together and alone."""
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case((7,), bias=bias, per_token_temperature=per_token)
    head = case.head()
    the_rest = {"targets": case.targets, "temperature": case.temperature}
    actual = linear_logprob(**head, **the_rest, return_entropy=True)
    expected = reference.linear_logprob(**head, **the_rest, return_entropy=True)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(linear_logprob(**head, **the_rest), expected[0])
    arguments = [head[name] for name in ("hidden", "weight", "bias") if name in head]

    def outputs(hidden, weight, bias=None):
        return linear_logprob(hidden, weight, bias=bias, **the_rest, return_entropy=True)

    assert torch.autograd.gradcheck(outputs, arguments)
    assert torch.autograd.gradcheck(lambda *head: outputs(*head)[0], arguments)
    assert torch.autograd.gradcheck(lambda *head: outputs(*head)[1], arguments)


def check_metrics(output, metrics, note):
    """To fp32: the specification's shares of clipped tokens are fp32 means."""
    for name, value in metrics.items():
        assert output.metrics[name].item() == pytest.approx(value.item(), rel=1e-6, abs=1e-9), (note, name)


@pytest.mark.parametrize("knobs", OBJECTIVES)
def test_linear_grpo_loss(monkeypatch, knobs):
    """Every objective x delta x old given or not x bias x temperature x chunks: the specification's loss, log-probs,
    metrics and gradients in fp64; finite differences where the loss is a function of the head alone (old given)."""
    knobs = with_length(knobs)
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
            if old:
                head = case.head()

                def loss_of(*tensors, case=case, head=head, delta=delta):
                    arguments = dict(zip(head, tensors, strict=True))
                    return linear_grpo_loss(**arguments, **case.rest(), delta=delta, **knobs).loss

                assert torch.autograd.gradcheck(loss_of, list(head.values()), fast_mode=True), note


@pytest.mark.parametrize("knobs", OBJECTIVES)
def test_grpo_loss(knobs):
    """The same of the loss from log-probs."""
    knobs = with_length(knobs)
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
            objective.token_weights(case.mask, case.cu_seqlens)[keep],
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


def test_entropy_metric_is_the_mean_over_active_rows():
    case = oracle.make_case()
    output, _ = oracle.run(case, linear_grpo_loss, return_entropy=True)
    _, entropy = reference.linear_logprob(
        case.hidden, case.weight, case.targets, temperature=case.temperature, return_entropy=True
    )
    assert output.metrics["entropy"].item() == pytest.approx(entropy[case.mask].mean().item())


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


# ---------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("per_token", [False, True], ids=["advantages-B", "advantages-BT"])
def test_padded_and_packed_agree(level, per_token):
    """hidden [B, T, D] with [B, T] tensors, and hidden [N, D] with [N] tensors, both requiring grad."""
    case = oracle.make_case((5, 5, 5), per_token_temperature=True)
    if not per_token:
        case = replace(case, advantages=torch.randn(3).double())
    knobs = {"loss_type": "grpo", "importance_sampling_level": level, "beta": 0.1}
    packed, gradients = oracle.run(case, linear_grpo_loss, **knobs)
    padded = {name: tensor.view(3, 5) for name, tensor in case.rest().items() if tensor.shape == (15,)}
    padded["advantages"] = case.advantages.view(3, 5) if per_token else case.advantages
    hidden = case.hidden.view(3, 5, -1).clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    output = linear_grpo_loss(hidden, weight, **padded, **knobs)
    output.loss.backward()
    assert torch.equal(output.loss, packed.loss)
    assert torch.equal(output.logps, packed.logps.view(3, 5)) and torch.equal(output.active, case.mask.view(3, 5))
    assert torch.equal(hidden.grad, gradients["hidden"].view(3, 5, -1)) and torch.equal(
        weight.grad, gradients["weight"]
    )


def test_padded_grpo_loss_agrees_with_packed():
    logps, old = torch.randn(2, 3, 4).unbind()
    for advantages in (torch.randn(3), torch.randn(3, 4)):
        padded = grpo_loss(logps, old, advantages, loss_type="grpo")
        flat = advantages if advantages.ndim == 1 else advantages.flatten()
        packed = grpo_loss(logps.flatten(), old.flatten(), flat, cu_seqlens=[0, 4, 8, 12], loss_type="grpo")
        assert torch.equal(padded.loss, packed.loss) and torch.equal(padded.logps.flatten(), packed.logps)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 3), ()], ids=str)
def test_linear_logprob_takes_any_leading_shape(shape):
    hidden, weight = torch.randn(*shape, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets, temperature = torch.randint(9, shape), torch.rand(shape) + 0.5
    logps, entropy = linear_logprob(hidden, weight, targets, temperature=temperature, return_entropy=True)
    (logps.sum() + entropy.sum()).backward()
    assert logps.shape == entropy.shape == shape and hidden.grad.shape == hidden.shape
    flat = (hidden.reshape(-1, 4), weight, targets.reshape(-1))
    expected = reference.linear_logprob(*flat, temperature=temperature.reshape(-1))
    torch.testing.assert_close(logps.reshape(-1), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_targets_of_any_integer_type(dtype):
    case = oracle.make_case(dtype=torch.float32)
    expected, gradients = oracle.run(case, linear_grpo_loss)
    output, actual = oracle.run(replace(case, targets=case.targets.to(dtype)), linear_grpo_loss)
    assert torch.equal(output.loss, expected.loss) and torch.equal(actual["weight"], gradients["weight"])
    logps = linear_logprob(case.hidden, case.weight, case.targets.to(dtype))
    assert torch.equal(logps, linear_logprob(case.hidden, case.weight, case.targets))


@pytest.mark.parametrize("name", ["advantages", "old_logps", "ref_logps", "temperature", "token_weights", "mask"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [None, 4], ids=["one-chunk", "chunks"])
def test_per_token_tensors_of_another_float_type(monkeypatch, name, dtype, chunk):
    """fp32 or bf16 hidden states beside fp64 rewards, or bf16 log-probs of a sampler."""
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(dtype=torch.float32, per_token_temperature=True)
    arguments = {**case.rest(), "token_weights": torch.rand(16), "beta": 0.1}
    arguments[name] = arguments[name].to(dtype)
    head = case.head()
    output = linear_grpo_loss(**head, **arguments)
    output.loss.backward()
    rounded = linear_grpo_loss(**case.head(), **{**arguments, name: arguments[name].float()})
    assert output.loss.dtype == output.logps.dtype == torch.float32
    torch.testing.assert_close(output.loss, rounded.loss)
    assert head["hidden"].grad.isfinite().all()


def test_only_the_loss_carries_gradient():
    case = oracle.make_case(masked=0.0)
    logps = torch.randn(16, requires_grad=True)
    for output in (
        linear_grpo_loss(**case.head(), **case.rest(), beta=0.1, return_entropy=True),
        grpo_loss(logps, None, case.advantages, ref_logps=case.ref_logps, beta=0.1),
    ):
        assert isinstance(output, GRPOLossOutput) and output.loss.requires_grad
        assert not output.logps.requires_grad and not output.active.requires_grad
        assert not any(value.requires_grad for value in output.metrics.values())


# --------------------------------------------------------------------------------- rows that cannot matter, bad values


def poisoned(case, name, value):
    bad = ~case.mask
    tensor = getattr(case, name).clone()
    tensor[bad] = value
    return replace(case, **{name: tensor})


@pytest.mark.parametrize("chunk", [None, 4], ids=["one-chunk", "chunks"])
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


@pytest.mark.parametrize("chunk", [None, 4], ids=["one-chunk", "chunks"])
@pytest.mark.parametrize("knobs", OBJECTIVES)
def test_all_rows_masked(monkeypatch, knobs, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(dtype=torch.float32, bias=True)
    case = replace(case, mask=torch.zeros(16), hidden=case.hidden * math.nan, targets=case.targets * 0 - 100)
    output, gradients = oracle.run(case, linear_grpo_loss, return_entropy=True, **with_length(knobs))
    assert output.loss.item() == 0 and not output.active.any() and (output.logps == 0).all()
    assert all((gradient == 0).all() for gradient in gradients.values())
    assert all(value.item() == 0 for value in output.metrics.values())
    logps = torch.randn(16, requires_grad=True)
    the_rest = {k: v for k, v in case.rest().items() if k in ("advantages", "mask", "cu_seqlens", "ref_logps")}
    output = grpo_loss(logps, None, **the_rest, **with_length(knobs))
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


# ----------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("chunk", [None, 4], ids=["one-chunk", "chunks"])
@pytest.mark.parametrize("knobs", OBJECTIVES)
def test_sum_over_micro_batches_is_the_whole_batch(monkeypatch, knobs, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    knobs = with_length(knobs)
    case = oracle.make_case(bias=True)
    weights = Objective(**knobs).token_weights(case.mask, case.cu_seqlens)
    whole, gradients = oracle.run(case, linear_grpo_loss, **knobs)
    head, losses = case.head(), []
    for first, last in ((0, 1), (1, 3), (3, 4)):
        start, end = case.cu_seqlens[first].item(), case.cu_seqlens[last].item()
        part = {name: value[start:end] for name, value in case.rest().items()
                if isinstance(value, torch.Tensor) and name != "cu_seqlens"}  # fmt: skip
        output = linear_grpo_loss(
            head["hidden"][start:end],
            head["weight"],
            bias=head["bias"],
            **part,
            cu_seqlens=case.cu_seqlens[first : last + 1] - start,
            token_weights=weights[start:end],
            temperature=case.temperature,
            **knobs,
        )
        output.loss.backward()
        losses.append(output.loss.detach())
    torch.testing.assert_close(sum(losses), whole.loss.detach())
    torch.testing.assert_close({name: tensor.grad for name, tensor in head.items()}, gradients)


def test_dapo_sums_over_micro_batches_by_num_items_in_batch():
    case = oracle.make_case((6, 6), masked=0.3)
    whole, _ = oracle.run(case, linear_grpo_loss)
    halves = []
    for part in (slice(0, 6), slice(6, 12)):
        per_token = {name: value[part] for name, value in case.rest().items() if getattr(value, "shape", 0) == (12,)}
        halves.append(linear_grpo_loss(case.hidden[part], case.weight, **per_token, temperature=case.temperature,
                                       num_items_in_batch=case.mask.sum()).loss)  # fmt: skip
    torch.testing.assert_close(sum(halves), whole.loss.detach())


# ------------------------------------------------------------------------------------------------------------ errors


def good():
    return {
        "hidden": torch.randn(6, 4),
        "weight": torch.randn(9, 4),
        "targets": torch.randint(9, (6,)),
        "advantages": torch.randn(6),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.randn(9, 5)}, r"weight must be \[V, D\] with D=4 of hidden \(6, 4\), got \(9, 5\)"),
        ({"weight": torch.randn(4)}, r"weight must be \[V, D\]"),
        ({"bias": torch.randn(8)}, r"bias must be \[V\]=\(9,\), got \(8,\)"),
        ({"targets": torch.randint(9, (5,))}, r"targets must be \(6,\) like hidden, got \(5,\)"),
        ({"targets": torch.rand(6)}, "targets must be integers, got torch.float32"),
        ({"hidden": torch.ones(6, 4, dtype=torch.long)}, "hidden must be floating point, got torch.int64"),
        ({"weight": torch.ones(9, 4, dtype=torch.long)}, "weight must be floating point, got torch.int64"),
        ({"targets": torch.tensor([0, 1, 2, 3, 4, 9])}, r"targets must be in \[0, 9\) on active rows, got 0 to 9"),
        ({"targets": torch.tensor([0, 1, 2, 3, 4, -100])}, r"targets must be in \[0, 9\) on active rows, got -100"),
        ({"advantages": torch.randn(5)}, r"advantages must be per token \(6,\).*got \(5,\)"),
        ({"advantages": torch.randn(2)}, "one value per sequence needs cu_seqlens"),
        ({"advantages": torch.randn(3), "cu_seqlens": [0, 2, 6]}, r"advantages must be per token \(6,\)"),
        ({"mask": torch.ones(5)}, r"mask must be \(6,\), got \(5,\)"),
        ({"old_logps": torch.zeros(6, 1)}, r"old_logps must be \(6,\), got \(6, 1\)"),
        ({"ref_logps": torch.zeros(3), "beta": 0.1}, r"ref_logps must be \(6,\), got \(3,\)"),
        ({"token_weights": torch.zeros(3)}, r"token_weights must be \(6,\), got \(3,\)"),
        ({"temperature": torch.ones(1)}, r"temperature must be \(6,\), got \(1,\)"),
        ({"beta": 0.1}, "beta=0.1 needs ref_logps"),
        ({"old_logps": torch.zeros(6, requires_grad=True)}, "old_logps must not require grad"),
        ({"ref_logps": torch.zeros(6, requires_grad=True), "beta": 0.1}, "ref_logps must not require grad"),
        ({"advantages": torch.zeros(6, requires_grad=True)}, "advantages must not require grad"),
        ({"loss_type": "grpo"}, "cu_seqlens is needed by loss_type='grpo'"),
        ({"loss_type": "dr_grpo", "max_completion_length": 8}, "cu_seqlens is needed by loss_type='dr_grpo'"),
        ({"importance_sampling_level": "sequence"}, "cu_seqlens is needed by.*'sequence'"),
        ({"cu_seqlens": [0, 2, 5]}, "cu_seqlens must rise from 0 to N=6"),
        ({"cu_seqlens": [1, 6]}, "cu_seqlens must rise from 0 to N=6"),
        ({"cu_seqlens": [0, 4, 2, 6]}, "cu_seqlens must rise from 0 to N=6"),
        ({"cu_seqlens": [[0, 6]]}, "cu_seqlens must rise from 0 to N=6"),
        ({"loss_type": "ppo"}, "loss_type must be one of"),
        ({"epsilon": 2.0}, r"epsilon must be in \[0, 1\)"),
        ({"backend": "cuda"}, "backend must be one of auto, chunked, triton, got 'cuda'"),
    ],
)
def test_errors_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        linear_grpo_loss(**{**good(), **change})
    if not {"hidden", "weight", "targets", "bias", "temperature"} & set(change):
        arguments = {"old_logps": None, "advantages": torch.randn(6), **change}
        with pytest.raises(ValueError, match=message):
            grpo_loss(torch.randn(6), **arguments)


def test_errors_of_linear_logprob():
    with pytest.raises(ValueError, match=r"targets must be in \[0, 9\)"):
        linear_logprob(torch.randn(2, 4), torch.randn(9, 4), torch.tensor([0, 9]))
    with pytest.raises(ValueError, match=r"temperature must be \(2,\), got \(3,\)"):
        linear_logprob(torch.randn(2, 4), torch.randn(9, 4), torch.tensor([0, 1]), temperature=torch.ones(3))
    with pytest.raises(ValueError, match="backend must be one of"):
        linear_logprob(torch.randn(2, 4), torch.randn(9, 4), torch.tensor([0, 1]), backend="cuda")


def test_errors_of_the_padded_layout():
    arguments = {"hidden": torch.randn(2, 3, 4), "weight": torch.randn(9, 4), "targets": torch.randint(9, (2, 3))}
    with pytest.raises(ValueError, match="cu_seqlens goes with the packed layout"):
        linear_grpo_loss(**arguments, advantages=torch.randn(2), cu_seqlens=[0, 3, 6])
    with pytest.raises(ValueError, match=r"advantages must be per token \(2, 3\) or per sequence, got \(3,\)"):
        linear_grpo_loss(**arguments, advantages=torch.randn(3))
    with pytest.raises(ValueError, match=r"tokens must be \[B, T\] or packed \[N\], got \(1, 2, 3\)"):
        linear_grpo_loss(torch.randn(1, 2, 3, 4), torch.randn(9, 4), torch.randint(9, (1, 2, 3)), torch.randn(1))


def test_backend_auto_says_what_it_chose(caplog):
    fastgrpo.loss.checks._log_choice.cache_clear()
    with caplog.at_level("INFO", "fastgrpo.loss.checks"):
        for _ in range(2):
            linear_grpo_loss(**good())
    assert [record.message for record in caplog.records] == ["backend='auto' runs the chunked path"]
