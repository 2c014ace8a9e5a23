"""Sampling on the CPU against plain PyTorch: filters, floors of awkward rows, undefined rows, the distribution."""

import math
from functools import partial

import pytest
import torch
from decode_cases import check_draws

from fastgrpo.kernels import reference, sampling

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("filters", [
    {}, slow({"top_k": 1}), {"top_k": 60},  # more than there are tiles
    slow({"top_p": 0.5}), {"top_p": 0.95}, {"top_p": 1e-300},  # 0 in fp32
    slow({"min_p": 0.05}), {"min_p": 1.0}, {"top_k": 20, "top_p": 0.8, "min_p": 0.1},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("shape", [(3, 101), slow((1, 32)), slow((1, 157))], ids=str)
def test_draws(shape, filters):
    temperature = 0.6 if shape[0] == 3 else 1.0
    logits, uniforms = torch.randn(shape) * 3, torch.rand(shape[0])
    tokens, _, _ = check_draws(logits, uniforms, temperature=temperature, **filters)
    expected, _, _ = reference.sample(logits, uniforms, temperature=temperature, **filters)
    assert torch.equal(tokens, expected)  # nothing here lies within rounding of a boundary


@pytest.mark.parametrize("filters", ({}, {"top_k": 9}, slow({"top_p": 0.9}), {"min_p": 0.1}), ids=str)
def test_the_ends_of_the_distribution(filters):
    """u = 0 and the largest float below 1, with tokens of probability 0 first and last."""
    logits = torch.randn(2, 150) * 2
    logits[:, :40] = logits[:, -45:] = -math.inf
    logits[:, 77] = -200.0
    check_draws(logits, torch.tensor([0.0, 1 - 2**-24]), temperature=1.0, **filters)


@pytest.mark.parametrize(
    "filters", (slow({"top_k": 5}), slow({"top_p": 0.31}), {"top_k": 30, "top_p": 0.41}, slow({"min_p": 0.5})), ids=str
)
@pytest.mark.parametrize("kind", ("equal", "signed zeros", "coarse", "huge", "masked by the least float", "tiny"))
def test_floors_of_awkward_rows(kind, filters):
    coarse = (torch.randn(1, 133) * 2).round()
    logits = {
        "equal": torch.full((1, 133), 1.7),
        "signed zeros": torch.where(torch.arange(133) % 2 == 0, 0.0, -0.0)[None].masked_fill(coarse > 1, 1.0),
        "coarse": coarse,
        "huge": torch.randn(1, 133) * 1e30,
        "masked by the least float": torch.randn(1, 133).masked_fill(coarse != 0, torch.finfo(torch.float32).min),
        "tiny": torch.randn(1, 133) * 1e-30,
    }[kind]
    check_draws(logits, torch.rand(1), temperature=1.0, **filters)


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.randn(4, 150)
    logits[1, 40] = logits[1, 140] = 9.0
    logits[2, :] = 0.5
    tokens, _, kept = check_draws(logits, torch.rand(4), temperature=0, top_k=3, top_p=0.5)
    assert tokens[1:3].tolist() == [40, 0] and (kept == 1).all()


def test_rows_without_a_distribution():
    logits = torch.randn(4, 70)
    logits[0, 50], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    for params in ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}):
        tokens, logps, kept = sampling.sample(logits, torch.full((4,), 0.5), **params)
        assert tokens[:3].tolist() == [0, 0, 0] and logps[:3].isnan().all() and kept[:3].isnan().all()
        expected = reference.sample(logits, torch.full((4,), 0.5), **params)
        assert torch.equal(tokens, expected[0]) and torch.equal(logps.isnan(), expected[1].isnan())
        torch.testing.assert_close(logps[3], expected[1][3])


def test_a_confident_token_keeps_its_precision():
    logits = torch.zeros(1, 100)
    logits[0, 50] = 20.0
    check_draws(logits, torch.tensor([0.5]), temperature=1.0)
    check_draws(logits * 10, torch.tensor([0.5]), temperature=1.0, top_p=0.9)


def test_a_row_draws_the_same_in_any_batch():
    logits, uniforms = torch.randn(8, 200)[::2, :100], torch.rand(4)
    assert logits.stride() == (400, 1)
    together = check_draws(logits, uniforms, temperature=0.8, top_p=0.9)
    alone = [sampling.sample(logits[i : i + 1], uniforms[i : i + 1], temperature=0.8, top_p=0.9) for i in range(4)]
    assert all(torch.equal(a, torch.cat(b)) for a, b in zip(together, zip(*alone, strict=True), strict=True))
