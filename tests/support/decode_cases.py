"""Inputs, truth and tolerance for the tests of the rollout's kernels, interpreted and on a GPU."""

import math

import torch

from fastgrpo.kernels import reference

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
NEAR = 1e-6  # of top_p or min_p: rounding decides about tokens as near as that to a filter's boundary
INTERVAL_SLACK = 1e-5  # of the cumulative probability, in which a draw's uniform may miss the token's interval
CLEAR_MASS = 5e-6  # where a boundary decides about more mass than that, both intervals are right


def kept_tokens(logits: torch.Tensor, temperature: float, filters: dict[str, float]) -> torch.Tensor:
    """Return which tokens the filters keep, [R, V] bool, by the reference."""
    return reference._kept(logits, temperature, **(OFF | filters))


def draw_errors(
    drawn: tuple, logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float, **filters: float
) -> tuple[dict[str, tuple[float, float]], float]:
    """Compare the tokens, log-probs and kept mass of `sample` with fp64.

    The drawn token's interval of the distribution must hold the uniform. Where a filter's boundary lies so close to a
    token that rounding decides (1e-6 of top_p or min_p either way), both sides are right; where that moves the mass by
    more than 5e-6, the interval is not looked at.
    """
    tokens, logps, kept = drawn
    lanes = torch.arange(len(logits), device=logits.device)
    logits, uniforms = logits.double(), uniforms.double()
    all_logps = torch.log_softmax(logits / (temperature or 1), dim=-1)
    true = all_logps[lanes, tokens]
    errors = {"logps": (((logps.double() - true).abs() - NEAR * true.abs()).max().item(), 1e-5)}
    if temperature == 0:
        wrong = (tokens != logits.argmax(-1)) | (kept != 1)
        return {**errors, "greedy": (wrong.double().mean().item(), 0.0)}, 1.0
    filters = OFF | filters
    top_p, min_p = filters["top_p"], filters["min_p"]
    fewest, most = (
        kept_tokens(logits, temperature, filters | {"top_p": p, "min_p": m})
        for p, m in (
            (top_p if top_p == 1 else top_p * (1 - NEAR), min(min_p * (1 + NEAR), 1.0)),
            (top_p if top_p == 1 else top_p * (1 + NEAR), min_p * (1 - NEAR)),
        )
    )
    probs = all_logps.exp()
    least, greatest = ((probs * some).sum(-1) for some in (fewest, most))
    errors["kept"] = (torch.maximum(least - kept, kept - greatest).max().item(), 1e-6)
    probs = probs * most
    cut = probs[lanes, tokens] == 0
    probs /= probs.sum(-1, keepdim=True)
    above = probs.cumsum(-1)[lanes, tokens]
    missed = torch.maximum(above - probs[lanes, tokens] - uniforms, uniforms - above).clamp(min=0)
    certain = greatest - least < CLEAR_MASS
    missed = torch.where(certain, missed, 0).masked_fill(cut, math.inf)
    errors["interval"] = (missed.max().item(), INTERVAL_SLACK)
    return errors, certain.float().mean().item()


def random_decode(
    members, prompt_lengths, lengths, *, heads,
    depth: int, dtype: torch.dtype = torch.float32, layout: str = "KC", device: str | torch.device = "cpu",
) -> dict:  # fmt: skip
    """Draw arguments of group_decode, with two slots more than there are lanes."""

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


def lane_attention(case: dict, lane: int) -> torch.Tensor:
    """Return the output [H, d] of one lane by PyTorch's own attention, in the dtype of the case."""
    own = slice(case["lengths"][lane].item())
    keys, values = case["keys"][lane, :, own], case["values"][lane, :, own]
    for prompt in (case["members"] == lane).any(-1).nonzero()[:, 0].tolist():
        shared = slice(case["prompt_lengths"][prompt].item())
        keys = torch.cat([case["prompt_keys"][prompt, :, shared], keys], dim=1)
        values = torch.cat([case["prompt_values"][prompt, :, shared], values], dim=1)
    query = case["query"][lane, None, :, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, keys[None], values[None], scale=case["scale"], enable_gqa=True
    )
    return out[0, :, 0]


def check_draws(logits, uniforms, *, temperature, clear=1.0, **filters):
    """Compare the tokens, log-probs and kept mass of `sample` with fp64, and return them.

    At least the share `clear` of the rows must be so far from the filters' boundaries that their draws can be judged.
    """
    from fastgrpo.kernels import sampling

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
