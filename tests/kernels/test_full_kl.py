"""The KL of the full distributions, of logits: against torch.distributions, and where probabilities underflow."""

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from fastgrpo.kernels import reference
from fastgrpo.kernels.head_torch import full_kl, full_kl_gradient_

INF = math.inf


def ours(z, ref, g):
    """KL and its gradient by z, of logits at temperature 1."""
    probs = z.softmax(-1)
    kl, log_ratio = full_kl(probs, ref.clone())
    return kl, full_kl_gradient_(probs, log_ratio, kl, g)


def test_value_and_gradient_are_those_of_torch():
    z, ref = (2 * torch.randn(2, 6, 9)).double()
    z.requires_grad_()
    g = torch.arange(6.0, dtype=torch.float64) - 2.5
    expected = kl_divergence(Categorical(logits=z), Categorical(logits=ref))
    (expected_dz,) = torch.autograd.grad(expected, z, g)
    kl, dz = ours(z.detach(), ref, g)
    plain = reference.full_kl(z, ref)
    plain_dz = torch.autograd.grad(plain, z, g)[0]
    torch.testing.assert_close((kl, dz), (expected.detach(), expected_dz), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close((plain, plain_dz), (expected, expected_dz), rtol=1e-13, atol=1e-14)
    for temperature in (0.7, torch.rand(6).double() + 0.5):
        column = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
        divided = kl_divergence(Categorical(logits=z / column), Categorical(logits=ref / column))
        torch.testing.assert_close(reference.full_kl(z, ref, temperature=temperature), divided)
    spoilt = ref.index_fill(0, torch.tensor([2]), math.nan)
    kl, dz = ours(z.detach(), spoilt, g)
    assert kl.isnan().tolist() == dz.isnan().all(-1).tolist() == [False, False, True, False, False, False]


def test_accepts_tokens_with_no_probability_under_the_reference():
    """Its probability underflows in fp32, its logarithm does not."""
    kl, dz = ours(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 500.0]]), torch.ones(1))
    assert kl.item() == pytest.approx(250 - math.log(2))
    assert dz[0].tolist() == pytest.approx([125, -125])
    assert ours(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, -INF]]), torch.ones(1))[0].item() == INF


@pytest.mark.parametrize("low", [-INF, -500.0], ids=["ruled-out", "underflow"])
@pytest.mark.parametrize("ref_low", [-INF, 1.0], ids=["by-both", "by-the-policy"])
def test_tokens_with_no_probability_under_the_policy_add_zero(low, ref_low):
    z, ref = torch.tensor([[1.0, 0.0, low]]), torch.tensor([[0.5, 0.25, ref_low]])
    kl, dz = ours(z, ref, torch.ones(1))
    p, log_q = z[0].double().softmax(-1)[:2], ref[0].double().log_softmax(-1)[:2]
    assert kl.item() == pytest.approx((p * (p.log() - log_q)).sum().item())
    assert dz.isfinite().all() and dz[0, 2] == 0 and dz.sum().item() == pytest.approx(0, abs=1e-6)
