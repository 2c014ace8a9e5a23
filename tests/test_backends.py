"""Which backend runs a loss, and what is said where one cannot; the soft-cap of the chunked backend."""

import pytest
import torch

import fastgrpo.loss
from fastgrpo import Objective, grpo_loss, linear_grpo_loss, linear_logprob, logits_grpo_loss
from fastgrpo.kernels import reference

N, D, V = 12, 8, 40


@pytest.fixture
def head():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g)
    return hidden, weight, torch.randint(V, (N,), generator=g), torch.randn(N, generator=g)


def calls(head):
    hidden, weight, targets, advantages = head
    return {
        "linear_logprob": lambda **kw: linear_logprob(hidden, weight, targets, **kw),
        "linear_grpo_loss": lambda **kw: linear_grpo_loss(hidden, weight, targets, advantages, **kw),
        "logits_grpo_loss": lambda **kw: logits_grpo_loss(hidden @ weight.T, targets, advantages, **kw),
        "grpo_loss": lambda **kw: grpo_loss(advantages - 5, None, advantages, **kw),
    }


@pytest.mark.parametrize("name", ("linear_logprob", "linear_grpo_loss", "logits_grpo_loss", "grpo_loss"))
def test_triton_on_the_cpu_is_refused_with_a_remedy(name, head):
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="backend='chunked', or set TRITON_INTERPRET=1"):
        calls(head)[name](backend="triton")


def test_an_unknown_backend_is_named(head):
    with pytest.raises(ValueError, match="backend must be one of auto, chunked, triton, got 'cuda'"):
        calls(head)["linear_logprob"](backend="cuda")


def test_without_triton(head, monkeypatch):
    monkeypatch.setattr(fastgrpo.loss, "HAS_TRITON", False)
    calls(head)["linear_logprob"](backend="auto")
    with pytest.raises(ValueError, match="needs Triton"):
        calls(head)["linear_logprob"](backend="triton")


@pytest.mark.parametrize("name", ("linear_logprob", "linear_grpo_loss"))
def test_a_softcap_must_be_positive(name, head):
    with pytest.raises(ValueError, match="logit_softcap must be positive, got 0"):
        calls(head)[name](logit_softcap=0.0)


def test_compact_is_checked(head):
    with pytest.raises(ValueError, match="compact must be None or 'sync', got True"):
        calls(head)["linear_grpo_loss"](compact=True)


@pytest.mark.parametrize("several_chunks", (False, True))
def test_the_softcap_of_the_chunked_backend(several_chunks, head, monkeypatch):
    if several_chunks:
        monkeypatch.setattr(fastgrpo.loss.chunked, "chunk_rows", lambda vocab_size: 5)
    hidden, weight, targets, advantages = (x.double() if x.is_floating_point() else x for x in head)
    hidden.requires_grad_()
    weight.requires_grad_()
    objective = Objective(entropy_coef=0.2)
    ours = linear_grpo_loss(hidden, weight, targets, advantages, logit_softcap=2.0, objective=objective)
    weights = torch.full((N,), 1 / N, dtype=torch.float64)
    theirs, _, _ = reference.linear_grpo_loss(
        hidden, weight, targets, advantages, weights, objective, entropy_weights=0.2 * weights, logit_softcap=2.0
    )
    torch.testing.assert_close(ours.loss, theirs)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (ours.loss, theirs)), strict=True):
        torch.testing.assert_close(a, b)
    logps, entropy = linear_logprob(hidden, weight, targets, logit_softcap=2.0, return_entropy=True)
    true = reference.linear_logprob(hidden, weight, targets, logit_softcap=2.0, return_entropy=True)
    ours, theirs = ((a.sum() + (b * b).sum()) for a, b in ((logps, entropy), true))
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)
