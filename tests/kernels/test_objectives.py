"""Every objective: the chunked closed form against plain autograd, layouts, micro-batches, errors."""

from types import SimpleNamespace

import pytest
import torch
from objective_cases import (
    CASES,
    LOSS_TYPES,
    OWN_CASES,
    SAMPLER_CASES,
    assert_close,
    problem,
    run,
    run_reference,
)

from fastgrpo import Objective, grpo_loss, linear_grpo_loss
from fastgrpo.kernels import head_torch


def poisoned(p):
    """The same batch with NaN and -100 wherever the mask is off: these places must never be read."""
    hole = ~p.mask
    tensors = {name: getattr(p, name).masked_fill(hole, torch.nan) for name in ("old_logps", "ref_logps")}
    tensors["sampler_logps"] = p.sampler_logps.masked_fill(hole, torch.nan)
    hidden = p.hidden.masked_fill(hole[..., None], torch.nan)
    return SimpleNamespace(**{**vars(p), **tensors, "hidden": hidden, "targets": p.targets.masked_fill(hole, -100)})


def check_against_reference(monkeypatch, knobs, old, sampler):
    p = problem()
    loss, logps, _, grads = run_reference(p, knobs, old=old, sampler=sampler)
    # one chunk; chunks that end with sequences; sequences longer than a chunk
    for size in (100, 9, 3):
        monkeypatch.setattr(head_torch, "chunk_rows", lambda _, size=size: size)
        out, own = run(poisoned(p), knobs, old=old, sampler=sampler)
        assert_close(out.loss, loss, 1e-10)
        for actual, expected in zip(own, grads, strict=True):
            assert_close(actual, expected, 1e-10)
        expected = torch.zeros_like(out.logps).masked_scatter(p.mask, logps)
        assert_close(out.logps, expected.masked_fill(~out.active, 0), 1e-10)
        if size == 100:
            metrics = run_reference(p, knobs, old=old, sampler=sampler, rows=out.active)[2]
        for name, expected in metrics.items():
            assert_close(out.metrics[name], expected, 1e-6 if "clip_ratio" in name else 1e-10)


@pytest.mark.parametrize("old", [True, False], ids=["old", "first-update"])
@pytest.mark.parametrize("name", CASES | OWN_CASES)
def test_equals_the_reference(monkeypatch, name, old):
    check_against_reference(monkeypatch, (CASES | OWN_CASES)[name], old, sampler=False)


@pytest.mark.parametrize("old", [True, False], ids=["old", "first-update"])
@pytest.mark.parametrize("name", SAMPLER_CASES)
def test_equals_the_reference_with_a_sampler(monkeypatch, name, old):
    check_against_reference(monkeypatch, SAMPLER_CASES[name], old, sampler=True)


@pytest.mark.parametrize("name", ["gspo", "vespo", "luspo-k3", "dapo-sequence_truncate", "vespo-token_mask"])
def test_tokens_without_advantage_or_weight_still_move_their_sequence(name):
    """Advantages per token, a third of them 0, and a token of weight 0: its sequence's factor must not lose them."""
    knobs, sampler = (CASES | SAMPLER_CASES)[name], name in SAMPLER_CASES
    p = problem()
    p.advantages = p.advantages[:, None] * (torch.arange(7) % 3 > 0)
    expected, _, _, grads = run_reference(p, knobs, sampler=sampler)
    objective, starts = Objective(**knobs), torch.arange(7) * 7
    weights = objective.token_weights(p.mask.flatten(), starts, dtype=torch.float64).view(p.mask.shape)
    out, own = run(p, knobs, sampler=sampler)
    by_hand, _ = run(p, knobs, sampler=sampler, token_weights=weights * (p.advantages != 0))
    assert_close(out.loss, expected, 1e-10)
    for actual, gradient in zip(own, grads, strict=True):
        assert_close(actual, gradient, 1e-10)
    if not knobs.get("beta"):  # without a KL a weight of 0 and an advantage of 0 are the same
        assert_close(by_hand.loss, expected, 1e-10)


@pytest.mark.parametrize("name", ["dapo", "gspo", "delta", "sapo", "sapo-sequence", "luspo-corrected", "k1-gspo"])
def test_gradcheck(name):
    p = problem(lengths=(4, 3, 2), width=4)
    knobs = (CASES | OWN_CASES)[name]
    ref = p.ref_logps if knobs.get("beta") else None

    def loss(logps):
        return grpo_loss(logps, p.old_logps, p.advantages, mask=p.mask, ref_logps=ref, **knobs).loss

    logps = (p.old_logps + 0.05).requires_grad_()
    assert torch.autograd.gradcheck(loss, logps, eps=1e-7, atol=1e-7, rtol=1e-6)


def test_gradients_of_the_entropy_bonus_by_finite_differences():
    p = problem(lengths=(3, 2), width=3)

    def loss(hidden, weight):
        knobs = {"entropy_coef": 0.5, "old_logps": p.old_logps, "mask": p.mask}
        return linear_grpo_loss(hidden, weight, p.targets % 5, p.advantages, **knobs).loss

    hidden, weight = p.hidden.requires_grad_(), p.weight[:5].clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (hidden, weight), eps=1e-6, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_first_update_has_ratio_exactly_one(name):
    out, _ = run(problem(torch.float32), LOSS_TYPES[name], old=False)
    assert out.metrics["ratio/max"] == 1 and out.metrics["ratio/mean"] == 1
    assert out.metrics["clip_ratio/low_mean"] == 0 and out.metrics["clip_ratio/high_mean"] == 0


def test_on_policy_vespo_and_cispo_are_reinforce():
    p = problem()
    losses = [run(p, LOSS_TYPES[name], old=False)[0] for name in ("vespo", "cispo")]
    weights = p.mask / p.mask.sum().double()
    expected = -(weights * p.advantages[:, None] * losses[0].logps).sum()
    for out in losses:
        assert_close(out.loss, expected, 1e-12)


@pytest.mark.parametrize("name", CASES | SAMPLER_CASES)
def test_packed_equals_padded(name):
    knobs, sampler = (CASES | SAMPLER_CASES)[name], name in SAMPLER_CASES
    p = problem()
    padded, (dh, dw, _) = run(p, knobs, sampler=sampler)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), p.mask.sum(1).cumsum(0)])
    fields = ("hidden", "targets", "old_logps", "ref_logps", "sampler_logps", "mask")
    packed = SimpleNamespace(**{**vars(p), **{field: getattr(p, field)[p.mask] for field in fields}})
    out, (packed_dh, packed_dw, _) = run(packed, knobs, sampler=sampler, cu_seqlens=cu_seqlens)
    assert_close(out.loss, padded.loss, 1e-12)
    assert_close(packed_dh, dh[p.mask], 1e-12)
    assert_close(packed_dw, dw, 1e-12)
    # rows given by hand: the same rows, the same result
    by_hand, (_, dw_by_hand, _) = run(p, knobs, sampler=sampler, rows=padded.active.flatten().nonzero()[:, 0])
    assert by_hand.loss == padded.loss and torch.equal(dw_by_hand, dw)


@pytest.mark.parametrize("name", ["dapo", "cispo", "vespo", "entropy", "vespo-token_mask"])
def test_micro_batches_sum_to_the_whole(name):
    knobs, sampler = (CASES | SAMPLER_CASES)[name], name in SAMPLER_CASES
    p = problem()
    whole, grads = run(p, knobs, sampler=sampler)
    parts = []
    for part in (slice(0, 2), slice(2, None)):
        fields = ("hidden", "targets", "advantages", "mask", "old_logps", "ref_logps", "sampler_logps")
        micro = SimpleNamespace(**{**vars(p), **{field: getattr(p, field)[part] for field in fields}})
        parts.append(run(micro, knobs, sampler=sampler, num_items_in_batch=p.mask.sum()))
    assert_close(sum(out.loss for out, _ in parts), whole.loss, 1e-12)
    assert_close(torch.cat([dh for _, (dh, _, _) in parts]), grads[0], 1e-12)
    assert_close(sum(dw for _, (_, dw, _) in parts), grads[1], 1e-12)


def test_entropy_bonus_keeps_rows_without_advantage_and_its_normalizer_is_the_mask():
    p = problem()
    p.advantages.zero_()
    out, _ = run(p, {"loss_type": "grpo", "entropy_coef": 0.5})
    assert torch.equal(out.active, p.mask)
    assert_close(out.loss, -0.5 * out.metrics["entropy"], 1e-7)  # weights are fp32
    assert out.metrics["policy_loss"] == 0


def test_a_sampler_that_agrees_changes_nothing():
    p = problem()
    p.sampler_logps = p.old_logps
    for name in ("dapo", "gspo", "vespo"):
        with_sampler, grads = run(p, LOSS_TYPES[name], sampler=True)
        without, expected = run(p, LOSS_TYPES[name])
        assert with_sampler.loss == without.loss and torch.equal(grads[0], expected[0])


def test_objective_by_record_and_by_name():
    p = problem()
    knobs = CASES["gspo-k3"]
    by_name = run(p, knobs)[0]
    by_record = linear_grpo_loss(
        p.hidden, p.weight, p.targets, p.advantages, mask=p.mask, bias=p.bias, temperature=p.temperature,
        old_logps=p.old_logps, ref_logps=p.ref_logps, objective=Objective(**knobs),
    )  # fmt: skip
    assert by_record.loss == by_name.loss.detach()
    with pytest.raises(ValueError, match="beta are fields of objective"):
        linear_grpo_loss(p.hidden, p.weight, p.targets, p.advantages, objective=Objective(), beta=0.1)
    with pytest.raises(TypeError, match="epsilon_hihg"):
        linear_grpo_loss(p.hidden, p.weight, p.targets, p.advantages, epsilon_hihg=0.1)


def test_refuses_calls_that_would_be_wrong():
    p = problem()
    with pytest.raises(ValueError, match=r"vespo.*'token_truncate' or 'token_mask'"):
        run(p, {"loss_type": "vespo"}, sampler=True)
    with pytest.raises(ValueError, match=r"entropy_coef=0\.1 needs the logits"):
        grpo_loss(p.old_logps, None, p.advantages, entropy_coef=0.1)
    p.sampler_logps.requires_grad_()
    with pytest.raises(ValueError, match="sampler_logps must not require grad"):
        run(p, {}, sampler=True)
    flat = p.hidden.flatten(0, 1), p.weight, p.targets.flatten(), p.old_logps.flatten()
    for knobs in ({"loss_type": "vespo"}, {"sampler_logps": p.old_logps.flatten()}):
        with pytest.raises(ValueError, match="cu_seqlens is needed"):
            linear_grpo_loss(*flat, **knobs)
