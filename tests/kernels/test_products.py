"""The products of the head's gradient, on the CPU: dH = v (E W), dW = E^T (v H), dbias = E^T v."""

import pytest
import torch

from fastgrpo.kernels import head_torch, objectives

N, V, D = 6, 9, 4


def problem(dtype):
    exps, hidden, weight = torch.rand(N, V).to(dtype), torch.randn(N, D).to(dtype), torch.randn(V, D).to(dtype)
    return exps, torch.randn(N), hidden, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products(dtype):
    """fp32 sums of the rounded operands, rounded once more at most."""
    exps, v, hidden, weight = problem(dtype)
    e, h, w = exps.double(), hidden.double(), weight.double()
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    dh = head_torch.hidden_product(exps, v, weight, torch.empty_like(hidden))
    dw = head_torch.add_weight_product_(torch.empty(V, D), exps, v, hidden, first=True)
    torch.testing.assert_close(dh.double(), v.double()[:, None] * (e @ w), **close)
    torch.testing.assert_close(dw.double(), e.T @ (v.double()[:, None] * h), **close)
    torch.testing.assert_close(head_torch.bias_product(exps, v).double(), e.T @ v.double(), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_chunks_add_up_and_the_first_reads_nothing(dtype):
    exps, v, hidden, _ = problem(dtype)
    total = torch.full((V, D), torch.nan)
    for part in (slice(0, 4), slice(4, N)):
        head_torch.add_weight_product_(total, exps[part], v[part], hidden[part], first=part.start == 0)
    whole = head_torch.add_weight_product_(torch.empty(V, D), exps, v, hidden, first=True)
    torch.testing.assert_close(total, whole, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 4, V - 1, V], ids=lambda rows: f"{rows} rows a block")
def test_logits_of_a_16_bit_head_are_those_of_its_weights_in_fp32(monkeypatch, rows):
    """A sum is rounded to fp32 alone: a product with 16-bit output would be off by up to 2^-8 of itself."""
    monkeypatch.setattr(head_torch, "CAST_BYTES", 4 * D * rows)
    _, _, hidden, weight = problem(torch.bfloat16)
    logits = head_torch.linear_fp32(hidden, weight)
    assert logits.dtype == torch.float32
    terms = hidden.double()[:, None] * weight.double()
    bound = D * torch.finfo(torch.float32).eps * terms.abs().sum(-1)
    assert ((logits - terms.sum(-1)).abs() <= bound).all()
    assert not (logits == (hidden @ weight.T).float()).all()


def test_who_wants_a_gradient_now():
    leaf, frozen = torch.ones(1, requires_grad=True), torch.ones(1)
    assert objectives.needed(leaf, frozen, None) == (True, False, False)
    with torch.no_grad():
        assert objectives.needed(leaf, frozen, None) == (False, False, False)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_compute_dtype(dtype, expected):
    assert head_torch.compute_dtype(torch.ones(1, dtype=dtype)) == expected


def test_no_autocast():
    a, b = torch.randn(2, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ b).dtype == torch.bfloat16
        with head_torch.no_autocast(a):
            assert (a @ b).dtype == torch.float32
