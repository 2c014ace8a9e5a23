"""The log-probs of a head of any shape; tests/kernels/test_chunked.py compares values and gradients."""

import pytest
import torch

from fastgrpo import linear_logprob
from fastgrpo.kernels import reference


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
