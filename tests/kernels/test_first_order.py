"""Second derivatives are refused by name, and everything else that runs a backward is not."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastgrpo import grpo_loss, linear_grpo_loss, linear_logprob, logits_grpo_loss

N, D, V = 6, 4, 9


TARGETS, ADVANTAGES = torch.arange(N), torch.arange(N) - 2.5
FUNCTIONS = {
    "linear_grpo_loss": lambda x, w: linear_grpo_loss(x, w, TARGETS, ADVANTAGES).loss,
    "logits_grpo_loss": lambda x, w: logits_grpo_loss(x @ w.T, TARGETS, ADVANTAGES).loss,
    "grpo_loss": lambda x, w: grpo_loss((x @ w.T)[:, 0], None, ADVANTAGES).loss,
    "linear_logprob": lambda x, w: linear_logprob(x, w, TARGETS).sum(),
}


@pytest.fixture
def inputs():
    return torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_create_graph_is_refused_by_name(name, inputs):
    loss = FUNCTIONS[name](*inputs)
    with pytest.raises(RuntimeError, match=f"^{name} has no second derivatives: .*create_graph=True"):
        torch.autograd.grad(loss, inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name} has no second derivatives"):
        torch.autograd.functional.hessian(lambda x: FUNCTIONS[name](x, inputs[1]), inputs[0])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_and_a_graph_kept_for_another_backward_are_not_refused(name, reentrant, inputs):
    expected = torch.autograd.grad(FUNCTIONS[name](*inputs), inputs)
    loss = checkpoint(FUNCTIONS[name], *inputs, use_reentrant=reentrant)
    loss.backward(retain_graph=not reentrant)
    assert all(torch.equal(tensor.grad, gradient) for tensor, gradient in zip(inputs, expected, strict=True))
    if not reentrant:
        assert all(map(torch.equal, torch.autograd.grad(FUNCTIONS[name](*inputs), inputs, retain_graph=True), expected))


def test_a_part_of_the_graph_without_the_loss_keeps_its_second_derivatives(inputs):
    x, w = inputs
    penalty = x.pow(3).sum()
    (slope,) = torch.autograd.grad(penalty, x, create_graph=True)
    (linear_grpo_loss(x, w, TARGETS, ADVANTAGES).loss + slope.square().sum()).backward()
    (alone,) = torch.autograd.grad(linear_grpo_loss(x, w, TARGETS, ADVANTAGES).loss, x)
    torch.testing.assert_close(x.grad, alone + 36 * x.detach() ** 3)  # d/dx (3 x^2)^2
