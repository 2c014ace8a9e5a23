"""Our triton_grpo_loss: Liger's signature, the truth per token and reduced, and logits whole until the backward.

Liger's own function runs on GPUs or in Triton's interpreter alone: the table of docs/integrations.md compares with it.
"""

import importlib
import inspect

import pytest
import torch

from benchmarks.liger_cases import (
    CASES,
    CLOSE,
    FULL,
    TEMPERATURE,
    batch,
    function_knobs,
    gap,
    logits_of,
    run_class,
    run_function,
    truth,
)
from fastgrpo.integrations.liger import LigerFusedLinearGRPOLoss, triton_grpo_loss


def arguments(p, knobs, **more):
    """Every argument but the logits."""
    return {
        "old_logp": p.old_logps, "ref_logp": p.ref_logps if knobs.get("beta") else None, "completion_ids": p.ids,
        "advantages": p.advantages, "completion_mask": p.mask, "temperature": TEMPERATURE, "vllm_is_ratio": p.ratio,
        **function_knobs(knobs), **more,
    }  # fmt: skip


def test_the_signature_is_liger_s():
    liger = importlib.import_module("liger_kernel.transformers.grpo_loss")
    mine, theirs = (inspect.signature(f).parameters.values() for f in (triton_grpo_loss, liger.triton_grpo_loss))
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize("name", CASES)
def test_every_loss_reduced_is_the_truth(name):
    knobs, options = CASES[name]
    p = batch(**options)
    assert gap(run_function(triton_grpo_loss, p, knobs), truth(p, knobs)) <= CLOSE


@pytest.mark.parametrize("name", CASES)
def test_every_loss_per_token_is_the_truth(name):
    """Any sum over the tokens, negative weights too, is that of the truth, and so is its gradient."""
    knobs, options = CASES[name]
    p = batch(**options)
    weights = torch.randn(p.mask.shape, generator=torch.Generator().manual_seed(2))
    logits = logits_of(p).requires_grad_()
    losses, kls, clipped = triton_grpo_loss(logits, **arguments(p, knobs, inplace=False))
    assert (losses[~p.mask] == 0).all() and (clipped[~p.mask] == 0).all()
    total = (losses * weights).sum()
    total.backward()
    metrics = [clipped.sum() / p.mask.sum()]
    if knobs.get("beta"):
        metrics.insert(0, kls.sum() / p.mask.sum())
    else:
        assert kls is None
    found = total.detach(), metrics, {"logits": logits.grad[:, :-1]}
    assert gap(found, truth(p, knobs, token_weights=weights)) <= CLOSE
    assert (logits.grad[:, -1] == 0).all()


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_tokens_of_the_step(loss_type):
    p, knobs = batch(), {"loss_type": loss_type, "epsilon_high": 1.5}
    assert gap(run_function(triton_grpo_loss, p, knobs, num_items=37), truth(p, knobs, num_items=37)) <= CLOSE


@pytest.mark.parametrize("name", ["dapo-corrected", "grpo-sequence-plain"])
def test_the_gradient_goes_over_the_logits_in_the_backward_alone(name):
    knobs, options = CASES[name]
    p = batch(**options)
    apart, over = (logits_of(p).requires_grad_() for _ in range(2))
    before = over.detach().clone()
    triton_grpo_loss(apart, **arguments(p, knobs, inplace=False))[0].sum().backward()
    losses, *_ = triton_grpo_loss(over, **arguments(p, knobs))
    assert torch.equal(over.detach().nan_to_num(), before.nan_to_num())
    losses.sum().backward(retain_graph=True)
    assert torch.equal(over.grad, apart.grad) and torch.equal(over.detach(), apart.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_without_a_mask_every_token_counts():
    p = batch(FULL)
    masked, bare = (
        triton_grpo_loss(logits_of(p), **arguments(p, {}, reduce=True, completion_mask=mask)) for mask in (p.mask, None)
    )
    assert masked[0] == bare[0] and masked[1] == bare[1]


def test_dr_grpo_divides_by_the_width_where_no_length_is_given():
    p, knobs = batch(), {"loss_type": "dr_grpo"}
    given = truth(p, knobs | {"max_completion_length": p.ids.shape[1]})
    assert gap(run_function(triton_grpo_loss, p, knobs), given) <= CLOSE


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3)])
def test_sequences_without_tokens(lengths):
    p, knobs = batch(lengths), CASES["grpo-corrected"][0]
    loss, metrics, gradients = run_function(triton_grpo_loss, p, knobs)
    assert gap((loss, metrics, {}), run_class(LigerFusedLinearGRPOLoss, p, knobs)) <= CLOSE
    assert (gradients["logits"][0] == 0).all() and loss.isfinite() and (loss == 0) == (not any(lengths))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    p = batch()
    logits = logits_of(p).to(dtype).requires_grad_()
    loss, metrics = triton_grpo_loss(logits, **arguments(p, {}, reduce=True))
    loss.backward()
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    assert loss.dtype == exact and logits.grad.dtype == dtype and isinstance(metrics, list)


def test_what_does_not_fit_is_refused():
    p = batch()
    with pytest.raises(ValueError, match=r"logits must be \[B, T \+ 1, V\]"):
        triton_grpo_loss(logits_of(p)[:, :-1], **arguments(p, {}))
    with pytest.raises(ValueError, match=r"vllm_is_ratio must be \[B\], \[B, 1\] or"):
        triton_grpo_loss(logits_of(p), **arguments(p, {}, vllm_is_ratio=torch.ones(3, 1)))
    with pytest.raises(ValueError, match="needs ref_logps"):
        triton_grpo_loss(logits_of(p), **arguments(p, {}, beta=0.1))
    with pytest.raises(ValueError, match="delta bounds the ratio of losses with clipping"):
        triton_grpo_loss(logits_of(p), **arguments(p, {"loss_type": "sapo"}, delta=1.5))


def test_it_has_no_second_derivatives():
    p = batch()
    logits = logits_of(p).requires_grad_()
    loss, _ = triton_grpo_loss(logits, **arguments(p, {}, reduce=True))
    with pytest.raises(RuntimeError, match="triton_grpo_loss has no second derivatives"):
        torch.autograd.grad(loss, logits, create_graph=True)
