"""The log-probs of a head: numbers by hand, gradients by finite differences, equality with kernels/reference.py."""

import math

import oracle
import pytest
import torch

from fastgrpo import linear_logprob
from fastgrpo.kernels import reference


def test_temperature_by_hand():
    # At temperature 1/2 the odds are squared: (4, 1, 1) and (1, 9, 1).
    logps = linear_logprob(*oracle.hand_case(), temperature=0.5)
    assert logps.tolist() == pytest.approx([math.log(4 / 6), math.log(1 / 11)])


@pytest.mark.parametrize(("bias", "per_token", "chunk"), [(False, False, None), (True, True, 3)])
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
    assert torch.autograd.gradcheck(lambda *head: outputs(*head)[0], arguments, fast_mode=True)
    assert torch.autograd.gradcheck(lambda *head: outputs(*head)[1], arguments, fast_mode=True)


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
