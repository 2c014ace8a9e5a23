"""What autograd, autocast and torch.compile ask of the chunked path."""

import math
import shutil
from dataclasses import replace

import oracle
import pytest
import torch

from fastgrpo import Objective, grpo_loss, linear_grpo_loss, linear_logprob
from fastgrpo.kernels import reference


@oracle.CHUNKS
@pytest.mark.parametrize("grad_output", [0.37, -3.0, 0.0, 65536.0])
def test_grad_output(monkeypatch, grad_output, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(bias=True)
    _, _, _, gradients = oracle.truth(case, grad_output=grad_output)
    _, actual = oracle.run(case, linear_grpo_loss, grad_output=grad_output)
    torch.testing.assert_close(actual, gradients)


@pytest.mark.gpu
def test_grad_output_is_not_read_by_the_host():
    hidden = torch.randn(16, 8, device="cuda", requires_grad=True)
    weight = torch.randn(32, 8, device="cuda", requires_grad=True)
    targets, advantages = torch.randint(32, (16,), device="cuda"), torch.randn(16, device="cuda")
    loss = linear_grpo_loss(hidden, weight, targets, advantages).loss
    grad_output = torch.tensor(0.37, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward(grad_output)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert weight.grad.isfinite().all()


@oracle.CHUNKS
def test_backward_twice(monkeypatch, chunk):
    """retain_graph: the second backward gives the same gradient again; without it, an error."""
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.float32_case(bias=True)
    _, once = oracle.run(case, linear_grpo_loss)
    head = case.head()
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
    oracle.set_chunk(monkeypatch, 4)
    case = oracle.float32_case()
    head = case.head()
    loss = linear_grpo_loss(**head, **case.rest()).loss
    gradient = torch.autograd.grad(loss, head["weight"], retain_graph=True)[0]
    gradient.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_rows_are_a_gradient_of_zero():
    """The first chunk overwrites dW, which is not zeroed before."""
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(32, 8, requires_grad=True)
    linear_logprob(hidden, weight, torch.zeros(0, dtype=torch.long)).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(32, 8)) and hidden.grad.shape == (0, 8)


@oracle.CHUNKS
@pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("hidden", "weight"), ("bias",)], ids="+".join)
def test_frozen_inputs(monkeypatch, frozen, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(bias=True)
    _, expected = oracle.run(case, linear_grpo_loss)
    head = {name: tensor.requires_grad_(name not in frozen) for name, tensor in case.head().items()}
    linear_grpo_loss(**head, **case.rest()).loss.backward()
    for name, tensor in head.items():
        assert tensor.grad is None if name in frozen else torch.equal(tensor.grad, expected[name])


def test_everything_frozen():
    case = oracle.make_case(bias=True)
    head = {name: tensor.requires_grad_(False) for name, tensor in case.head().items()}
    output = linear_grpo_loss(**head, **case.rest())
    assert not output.loss.requires_grad
    assert torch.equal(output.loss, oracle.run(case, linear_grpo_loss)[0].loss)
    assert not linear_logprob(**head, targets=case.targets).requires_grad


@oracle.CHUNKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_non_contiguous_hidden_and_transposed_weight(monkeypatch, dtype, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case((4, 4, 4), dtype=dtype)
    expected, gradients = oracle.run(case, linear_grpo_loss)
    # hidden as the usual shifted slice of [B, T+1, D] and stored feature-major; weight stored [D, V].
    wide = torch.cat([case.hidden.view(3, 4, 6), torch.full((3, 1, 6), math.nan, dtype=dtype)], 1)
    per_token = {name: value.view(3, 4) for name, value in case.rest().items() if getattr(value, "shape", 0) == (12,)}
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


@oracle.CHUNKS
def test_tied_embedding(monkeypatch, chunk):
    """One parameter embeds and projects: both gradients add up, and nothing writes `.grad` in the forward."""
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(dim=11)
    ids = torch.randint(11, (16,))
    gradients = []
    for loss in (
        lambda hidden, weight: linear_grpo_loss(hidden, weight, **case.rest()).loss,
        lambda hidden, weight: reference.linear_grpo_loss(
            hidden[case.mask], weight, case.targets[case.mask], case.advantages[case.mask],
            torch.full((16,), 1 / case.mask.sum().item()).double()[case.mask], Objective(),
            old_logps=case.old_logps[case.mask], temperature=case.temperature,
        )[0],
    ):  # fmt: skip
        weight = case.weight.clone().requires_grad_()
        result = loss(torch.tanh(weight[ids]), weight)
        assert weight.grad is None
        result.backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients)


@oracle.CHUNKS
def test_gradients_accumulate(monkeypatch, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.float32_case()
    _, once = oracle.run(case, linear_grpo_loss)
    head = case.head()
    for tensor in head.values():
        tensor.grad = torch.ones_like(tensor)
    linear_grpo_loss(**head, **case.rest()).loss.backward()
    assert all(torch.equal(tensor.grad, 1 + once[name]) for name, tensor in head.items())


@oracle.CHUNKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_give_the_same_bits(monkeypatch, dtype, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case((40, 30, 50), vocab=130, dim=32, dtype=dtype, bias=True)
    first, gradients = oracle.run(case, linear_grpo_loss)
    second, again = oracle.run(case, linear_grpo_loss)
    assert torch.equal(first.loss, second.loss) and torch.equal(first.logps, second.logps)
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)


@oracle.CHUNKS
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(monkeypatch, hidden_dtype, level, chunk):
    """The head computes in fp32 by itself; a bf16 hidden state may meet an fp32 weight there. Forward and backward."""
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.float32_case(bias=True)
    case = replace(case, hidden=case.hidden.to(hidden_dtype))
    knobs = {"importance_sampling_level": level, "loss_type": "grpo", "beta": 0.1, "return_entropy": True}
    expected, gradients = oracle.run(case, linear_grpo_loss, **knobs)
    head = case.head()
    with torch.autocast("cpu", torch.bfloat16):
        output, actual = oracle.run(case, linear_grpo_loss, **knobs)
        logps, entropy = linear_logprob(**head, targets=case.targets, return_entropy=True)
        (logps + entropy).sum().backward()
        policy = grpo_loss(logps.detach(), case.old_logps, case.advantages)
    assert output.loss.dtype == logps.dtype == policy.loss.dtype == torch.float32
    assert torch.equal(output.loss, expected.loss) and torch.equal(output.logps, expected.logps)
    assert all(torch.equal(actual[name], gradients[name]) for name in gradients)
    plain = case.head()
    outputs = linear_logprob(**plain, targets=case.targets, return_entropy=True)
    sum(outputs).sum().backward()
    assert torch.equal(logps, outputs[0]) and torch.equal(entropy, outputs[1])
    assert all(torch.equal(head[name].grad, plain[name].grad) for name in head)


@oracle.CHUNKS
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_under_torch_compile(monkeypatch, level, chunk):
    oracle.set_chunk(monkeypatch, chunk and 8)  # two chunks: each is traced anew
    torch._dynamo.reset()
    case = oracle.float32_case(bias=True)
    knobs = {"importance_sampling_level": level, "loss_type": "grpo", "beta": 0.1}
    expected, gradients = oracle.run(case, linear_grpo_loss, **knobs)

    @torch.compile(backend="eager")
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
@oracle.CHUNKS
def test_under_torch_compile_with_inductor(monkeypatch, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    torch._dynamo.reset()
    case = oracle.float32_case(bias=True)
    expected, gradients = oracle.run(case, linear_grpo_loss, beta=0.1)
    head = case.head()
    compiled = torch.compile(lambda **head: linear_grpo_loss(**head, **case.rest(), beta=0.1).loss)
    loss = compiled(**head)
    loss.backward()
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close({name: tensor.grad for name, tensor in head.items()}, gradients)
