"""Inputs, truth and tolerance for the tests of the rollout's kernels, interpreted and on a GPU."""

from functools import partial

import torch

from fastgrpo.kernels import reference

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
NEAR = 1e-6  # of top_p or min_p: rounding decides about tokens as near as that to a filter's boundary
CLEAR_MASS = 5e-6  # where a boundary decides about more mass than that, both intervals are right


def check_draws(logits, uniforms, *, temperature, clear=1.0, **filters):
    """Compare the tokens, log-probs and kept mass of `sample` with fp64, and return them.

    The drawn token's interval of the distribution must hold the uniform. Where a filter's boundary lies so close to a
    token that rounding decides, both sides are right; where that moves more than CLEAR_MASS, the interval is not looked
    at. At least the share `clear` of the rows must be looked at.
    """
    from fastgrpo.kernels import sampling

    tokens, logps, kept = drawn = sampling.sample(logits, uniforms, temperature=temperature, **filters)
    assert tokens.dtype == torch.int64 and logps.dtype == kept.dtype == torch.float32
    lanes, logits, uniforms = torch.arange(len(logits)), logits.double(), uniforms.double()
    all_logps = torch.log_softmax(logits / (temperature or 1), dim=-1)
    torch.testing.assert_close(logps.double(), all_logps[lanes, tokens], rtol=NEAR, atol=1e-5)
    if temperature == 0:
        assert torch.equal(tokens, logits.argmax(-1)) and (kept == 1).all()
        return drawn
    filters = OFF | filters
    masks = []
    for change in (NEAR, -NEAR):
        top_p = filters["top_p"] if filters["top_p"] == 1 else filters["top_p"] * (1 - change)
        near = filters | {"top_p": top_p, "min_p": min(filters["min_p"] * (1 + change), 1.0)}
        masks.append(reference._kept(logits, temperature, **near))
    least, most = (all_logps.exp() * mask for mask in masks)
    assert (torch.maximum(least.sum(-1) - kept, kept - most.sum(-1)) <= 1e-6).all()
    assert (most[lanes, tokens] > 0).all()
    certain = most.sum(-1) - least.sum(-1) < CLEAR_MASS
    assert certain.float().mean() >= clear
    probs = most / most.sum(-1, keepdim=True)
    above = probs.cumsum(-1)[lanes, tokens]
    missed = torch.maximum(above - probs[lanes, tokens] - uniforms, uniforms - above)
    assert (missed[certain] <= 1e-5).all(), missed  # of the cumulative probability
    return drawn


def random_decode(members, prompt_lengths, lengths, *, heads, depth, dtype=torch.float32, layout="KC", device="cpu"):
    """Draw arguments of group_decode, with two slots more than there are lanes."""

    def slots(n, tokens, tokens_first):
        shape = (n, tokens, heads[1], depth) if tokens_first else (n, heads[1], tokens, depth)
        drawn = torch.randn(shape, device=device).to(dtype)
        return drawn.transpose(1, 2) if tokens_first else drawn

    integers = partial(torch.tensor, dtype=torch.int32, device=device)
    case = {"query": torch.randn(len(lengths), heads[0], depth, device=device).to(dtype), "scale": depth**-0.5}
    case["lengths"], case["prompt_lengths"] = integers(lengths), integers(prompt_lengths)
    case["members"] = integers(members) if members else integers([]).view(0, 4)
    for prefix, of in (("", lengths), ("prompt_", prompt_lengths)):
        n, tokens = len(of) + (0 if prefix else 2), max(of, default=0) + 1
        case[f"{prefix}keys"] = slots(n, tokens, layout != "KC")
        case[f"{prefix}values"] = slots(n, tokens, layout == "CK")
    return case


def grown(case):
    """Return the arguments with the lanes' keys and values as lanes that grow hold them: those of layer 1 of 3."""
    slots, heads, tokens, depth = case["keys"].shape
    memory = case["keys"].new_full((slots, tokens * 3 + 1, 2, heads, depth), torch.nan)
    views = memory[:, 1::3].permute(2, 0, 3, 1, 4).copy_(torch.stack([case["keys"], case["values"]]))
    return case | {"keys": views[0], "values": views[1]}


def random_rotation(lanes, heads, depth, normed, dtype, order=(0, 1, 2), device="cpu"):
    """Draw arguments of rotate_and_store: two slots more than there are lanes, with this memory order."""

    def randn(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    def slots():
        shape = lanes + 2, heads[1], 6
        drawn = randn(*(shape[dim] for dim in order), depth)
        return drawn.permute(*(order.index(dim) for dim in range(3)), 3)

    angles = torch.rand(lanes, depth // 2, device=device).mul(7).repeat(1, 2)
    case = {"packed": randn(lanes, heads[0] + 2 * heads[1], depth), "keys": slots(), "values": slots(), "eps": 1e-5}
    case |= {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    case |= {"token_index": torch.randint(6, (lanes,), device=device)}
    return case | {"norms": (randn(depth), randn(depth)) if normed else None}
