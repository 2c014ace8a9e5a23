"""Inputs, truth and tolerance for the tests of the rollout's kernels, interpreted and on a GPU."""

import math

import torch

from fastgrpo.kernel_checks.rollouts import draw_errors, kept_tokens, random_decode
from fastgrpo.kernels import sampling


def check_draws(logits, uniforms, *, temperature, clear=1.0, **filters):
    """Compare the tokens, log-probs and kept mass of `sample` with fp64, and return them.

    At least the share `clear` of the rows must be so far from the filters' boundaries that their draws can be judged.
    """
    drawn = sampling.sample(logits, uniforms, temperature=temperature, **filters)
    tokens, logps, kept = drawn
    assert tokens.dtype == torch.int64 and logps.dtype == kept.dtype == torch.float32
    errors, judged = draw_errors(drawn, logits, uniforms, temperature=temperature, **filters)
    assert all(error <= most for error, most in errors.values()), errors
    assert judged >= clear
    return drawn


def chi_square_score(tokens, row, temperature, filters):
    """Return by how many standard deviations the chi-square of draws from one row [V] exceeds its mean.

    No token that the filters cut may have been drawn.
    """
    kept = kept_tokens(row[None], temperature, filters)[0]
    probs = (row / temperature).masked_fill(~kept, -math.inf).softmax(-1)
    counts = torch.bincount(tokens, minlength=len(row))
    assert (counts[~kept] == 0).all()
    expected = len(tokens) * probs
    chi2 = ((counts - expected)[kept].square() / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty: (chi2 / f)^(1/3) is normal with mean 1 - 2/(9f) and variance 2/(9f)
    return ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


__all__ = ["check_draws", "chi_square_score", "random_decode"]
