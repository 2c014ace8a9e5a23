"""What autograd, autocast and torch.compile ask of the path by chunks."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
from oracle import CHUNKS, float32_case, make_case, run, set_chunk
from torch.utils.checkpoint import checkpoint

from fastgrpo import grpo_loss, linear_grpo_loss, linear_logprob, logits_grpo_loss


@CHUNKS
def test_backward_twice_and_gradients_that_accumulate(monkeypatch, chunk):
    set_chunk(monkeypatch, chunk)
    case = float32_case(bias=True)
    _, once = run(case, linear_grpo_loss)
    head = case.head()
    for tensor in head.values():
        tensor.grad = torch.zeros_like(tensor)
    loss = linear_grpo_loss(**head, **case.rest()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(torch.equal(tensor.grad, 2 * once[name]) for name, tensor in head.items())
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    logps = linear_logprob(**head, targets=case.targets)
    first = torch.autograd.grad(logps.sum(), head["weight"], retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(logps.sum(), head["weight"])[0])


def test_a_gradient_that_was_written_to_is_not_given_again(monkeypatch):
    """With a grad_output of 1 the gradient is what the forward saved, without a copy of it: autograd counts writes."""
    set_chunk(monkeypatch, 4)
    case = float32_case()
    head = case.head()
    loss = linear_grpo_loss(**head, **case.rest()).loss
    torch.autograd.grad(loss, head["weight"], retain_graph=True)[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@CHUNKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_non_contiguous_hidden_and_transposed_weight(monkeypatch, dtype, chunk):
    set_chunk(monkeypatch, chunk)
    case = make_case((4, 4, 4), dtype=dtype)
    expected, gradients = run(case, linear_grpo_loss)
    # hidden as the usual shifted slice of [B, T+1, D] and stored feature-major; weight stored [D, V].
    wide = torch.cat([case.hidden.view(3, 4, 6), torch.full((3, 1, 6), math.nan, dtype=dtype)], 1)
    per_token = {name: value.view(3, 4) for name, value in case.per_token().items()}
    for store in (wide, wide.transpose(0, 2).contiguous().transpose(0, 2), wide.repeat_interleave(2, -1)[..., ::2]):
        leaf = store.requires_grad_()
        hidden = leaf[:, :-1]
        transposed = case.weight.T.contiguous().requires_grad_()
        assert not hidden.is_contiguous() and not transposed.T.is_contiguous()
        output = linear_grpo_loss(hidden, transposed.T, **per_token, temperature=case.temperature)
        output.loss.backward()
        torch.testing.assert_close(output.loss, expected.loss)
        torch.testing.assert_close(leaf.grad[:, :-1].reshape(12, 6), gradients["hidden"])
        torch.testing.assert_close(transposed.grad.T, gradients["weight"])
        assert (leaf.grad[:, -1] == 0).all()


@CHUNKS
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(monkeypatch, hidden_dtype, chunk):
    """The head computes in fp32 by itself; a bf16 hidden state may meet an fp32 weight there. Forward and backward."""
    set_chunk(monkeypatch, chunk)
    case = float32_case(bias=True)
    case = replace(case, hidden=case.hidden.to(hidden_dtype))
    knobs = {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.1, "return_entropy": True}

    def both():
        head = case.head()
        output, gradients = run(case, linear_grpo_loss, **knobs)
        logps, entropy = linear_logprob(**head, targets=case.targets, return_entropy=True)
        (logps + entropy).sum().backward()
        apart = grpo_loss(logps.detach(), case.old_logps, case.advantages).loss
        outputs = output.loss.detach(), output.logps, logps.detach(), entropy.detach(), apart
        return *outputs, *gradients.values(), *(tensor.grad for tensor in head.values())

    expected = both()
    with torch.autocast("cpu", torch.bfloat16):
        found = both()
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("backend, level, chunk", [
    ("eager", "sequence", 8), ("eager", "token", 8), ("eager", "sequence", None), ("inductor", "token", 8),
])  # fmt: skip
def test_under_torch_compile(monkeypatch, backend, level, chunk):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler on the CPU")
    set_chunk(monkeypatch, chunk)
    torch._dynamo.reset()
    case = float32_case(bias=True)
    knobs = {"importance_sampling_level": level, "loss_type": "grpo", "beta": 0.1}
    expected, gradients = run(case, linear_grpo_loss, **knobs)

    @torch.compile(backend=backend)
    def step(hidden, weight, bias, scale):
        output = linear_grpo_loss(hidden * scale, weight, bias=bias, **case.rest(), **knobs)
        logps = linear_logprob(hidden, weight, case.targets, bias=bias, temperature=case.temperature)
        apart = grpo_loss(logps, case.old_logps, case.advantages, mask=case.mask, cu_seqlens=case.cu_seqlens,
                          ref_logps=case.ref_logps, **knobs)  # fmt: skip
        return output.loss * 2, apart.loss, output.metrics["kl"]

    head = case.head()
    loss, apart, kl = step(*head.values(), torch.ones(()))
    (loss - apart).backward()
    torch.testing.assert_close(loss / 2, expected.loss)
    torch.testing.assert_close(apart, expected.loss)
    torch.testing.assert_close(kl, expected.metrics["kl"])
    torch.testing.assert_close({name: tensor.grad for name, tensor in head.items()}, gradients)


TARGETS, ADVANTAGES = torch.arange(6), torch.arange(6) - 2.5
FUNCTIONS = {
    "linear_grpo_loss": lambda x, w: linear_grpo_loss(x, w, TARGETS, ADVANTAGES).loss,
    "logits_grpo_loss": lambda x, w: logits_grpo_loss(x @ w.T, TARGETS, ADVANTAGES).loss,
    "grpo_loss": lambda x, w: grpo_loss((x @ w.T)[:, 0], None, ADVANTAGES).loss,
    "linear_logprob": lambda x, w: linear_logprob(x, w, TARGETS).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_are_refused_by_name_and_checkpoints_are_not(name):
    inputs = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"^{name} has no second derivatives"):
        torch.autograd.grad(FUNCTIONS[name](*inputs), inputs[0], create_graph=True)
    expected = torch.autograd.grad(FUNCTIONS[name](*inputs), inputs)
    for reentrant in (False, True):
        checkpoint(FUNCTIONS[name], *inputs, use_reentrant=reentrant).backward(retain_graph=not reentrant)
        assert all(torch.equal(tensor.grad, gradient) for tensor, gradient in zip(inputs, expected, strict=True))
        for tensor in inputs:
            tensor.grad = None
