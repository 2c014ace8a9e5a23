"""The loss of logits that are already there: layouts, low precision, what it overwrites and what it keeps."""

import pytest
import torch
from oracle import padded_case

from benchmarks.compare import compare
from fastgrpo import logits_grpo_loss
from fastgrpo.kernels import head_torch


def problem(dtype=torch.float64):
    case = padded_case((5, 3, 0, 4), width=5, dtype=dtype, per_token_temperature=True, sampler=False)
    return case.hidden @ case.weight.T, case.rest()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_logits_round_once(dtype):
    """The gradient is the exact one of the rounded logits, rounded to their dtype."""
    logits, rest = problem(dtype)
    exact = logits.detach().double().requires_grad_()
    logits.requires_grad_()
    for given in (logits, exact):
        logits_grpo_loss(given, **rest).loss.backward()
    assert logits.grad.dtype == dtype
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=1e-7)


def test_inplace_writes_the_gradient_over_the_logits_and_refuses_a_second_backward():
    logits, rest = problem()
    leaf = logits.requires_grad_()
    kept, overwritten = leaf * 1, leaf * 1
    before = kept.detach().clone()
    out = logits_grpo_loss(kept, **rest)
    (expected,) = torch.autograd.grad(out.loss, kept, retain_graph=True)
    assert torch.equal(kept.detach(), before) and torch.equal(torch.autograd.grad(out.loss, kept)[0], expected)
    out = logits_grpo_loss(overwritten, inplace=True, **rest)
    (gradient,) = torch.autograd.grad(out.loss, overwritten, retain_graph=True)
    assert gradient.data_ptr() == overwritten.data_ptr() and torch.equal(overwritten.detach(), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.loss, leaf)


@pytest.mark.parametrize("entropy_coef, chunks", [(0.0, 1), (0.1, 2)])
@pytest.mark.parametrize("inplace", [False, True], ids=["new-gradient", "inplace"])
def test_memory_is_a_chunk_beside_one_gradient(monkeypatch, inplace, entropy_coef, chunks):
    rows, vocab, size = 256, 4096, 16
    monkeypatch.setattr(head_torch, "chunk_rows", lambda *_: size)
    whole, chunk = rows * vocab * 2, size * vocab * 4
    leaf, targets, advantages = torch.randn(rows, vocab).bfloat16(), torch.randint(vocab, (rows,)), torch.randn(rows)
    leaf.requires_grad_()

    def gradient():
        logits = leaf * 1  # as large as the gradient, which takes its place inplace
        out = logits_grpo_loss(logits, targets, advantages, inplace=inplace, entropy_coef=entropy_coef)
        return torch.autograd.grad(out.loss, logits)

    # The chunk's gradient is there once more in the logits' dtype, on its way into the whole one.
    peak = compare({"gradient": gradient}, 1)["gradient"]["peak_bytes"]
    assert peak <= (0 if inplace else whole) + (chunks + 0.7) * chunk


def test_accepts_logits_of_minus_infinity():
    logits, rest = problem()
    logits[..., 3] = -torch.inf
    rest["targets"][rest["targets"] == 3] = 4
    logits.requires_grad_()
    out = logits_grpo_loss(logits, entropy_coef=0.3, **rest)
    out.loss.backward()
    assert out.loss.isfinite() and logits.grad.isfinite().all()
    assert (logits.grad[..., 3] == 0).all() and out.metrics["entropy"] > 0
