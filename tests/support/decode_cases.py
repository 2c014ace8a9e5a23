"""Inputs, truth and tolerance for the tests of the rollout's kernels, interpreted and on a GPU."""

import math

import torch

from fastgrpo.kernels import reference, sampling

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def kept_tokens(logits, temperature, filters):
    """Return which tokens the filters keep, [R, V] bool, by the reference."""
    return reference._kept(logits, temperature, **(OFF | filters))


def check_draws(logits, uniforms, *, temperature, clear=1.0, **filters):
    """Compare the tokens, log-probs and kept mass of `sample` with fp64, and return them.

    The drawn token's interval of the distribution must hold u within 1e-5. Where a filter's boundary lies so close to a
    token that rounding decides (1e-6 of top_p or min_p either way), both sides are right; where that moves the mass by
    more than 5e-6, the interval is not looked at. At least the share `clear` of the rows must be clear of that.
    """
    params = {"temperature": temperature, **filters}
    tokens, logps, kept = sampling.sample(logits, uniforms, **params)
    rows = torch.arange(len(logits), device=logits.device)
    assert tokens.dtype == torch.int64 and logps.dtype == kept.dtype == torch.float32
    logits, uniforms = logits.double(), uniforms.double()
    all_logps = torch.log_softmax(logits / (temperature or 1), dim=-1)
    torch.testing.assert_close(logps.double(), all_logps[rows, tokens], rtol=1e-6, atol=1e-5)
    if temperature == 0:
        assert torch.equal(tokens, logits.argmax(-1)) and (kept == 1).all()
        return tokens, logps, kept
    filters = OFF | filters
    top_p, min_p = filters["top_p"], filters["min_p"]
    fewest, most = (
        kept_tokens(logits, temperature, filters | {"top_p": p, "min_p": m})
        for p, m in (
            (top_p if top_p == 1 else top_p * (1 - 1e-6), min(min_p * (1 + 1e-6), 1.0)),
            (top_p if top_p == 1 else top_p * (1 + 1e-6), min_p * (1 - 1e-6)),
        )
    )
    probs = all_logps.exp()
    least, greatest = ((probs * some).sum(-1) for some in (fewest, most))
    assert ((least - 1e-6 <= kept) & (kept <= greatest + 1e-6)).all()
    probs = probs * most
    assert (probs[rows, tokens] > 0).all(), "a token of probability 0, or one that a filter cut"
    probs /= probs.sum(-1, keepdim=True)
    above = probs.cumsum(-1)[rows, tokens]
    good = (above - probs[rows, tokens] - 1e-5 <= uniforms) & (uniforms <= above + 1e-5)
    certain = greatest - least < 5e-6
    assert good[certain].all() and certain.float().mean() >= clear
    return tokens, logps, kept


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


def random_decode(members, prompt_lengths, lengths, *, heads, depth, dtype=torch.float32, layout="KC", device="cpu"):
    """Return arguments of group_decode with heads (H, K), and two slots more than there are lanes.

    layout is that of the memory: "KC" is [slots, K, tokens, d], "CK" is [slots, tokens, K, d], and "mixed" has keys in
    the one and values in the other.
    """

    def randn(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    def slots(n, tokens, tokens_first):
        if tokens_first:
            return randn(n, tokens, heads[1], depth).transpose(1, 2)
        return randn(n, heads[1], tokens, depth)

    def integers(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    case = {"query": randn(len(lengths), heads[0], depth), "scale": depth**-0.5}
    case["lengths"], case["prompt_lengths"] = integers(lengths), integers(prompt_lengths)
    case["members"] = integers(members) if members else integers([]).view(0, 4)
    for prefix, of in (("", lengths), ("prompt_", prompt_lengths)):
        n, tokens = len(of) + (0 if prefix else 2), max(of, default=0) + 1
        case[f"{prefix}keys"] = slots(n, tokens, layout != "KC")
        case[f"{prefix}values"] = slots(n, tokens, layout == "CK")
    return case
