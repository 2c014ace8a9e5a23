"""The trials of the kernels of a rollout: random inputs, and how far a draw or an attention output is from the truth.

Shapes: R lanes, V vocabulary, P prompts, G lanes of a prompt, H query heads, K key heads, d width of a head.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fastgrpo.kernel_checks.heads import SLACK, relative_error
from fastgrpo.kernel_checks.places import Place, Trial
from fastgrpo.kernels import reference
from fastgrpo.loss.checks import HAS_TRITON

if HAS_TRITON:
    from fastgrpo.kernels.decode import group_decode
    from fastgrpo.kernels.sampling import sample

Tensor = torch.Tensor
# Prompts, lanes of each, tokens of a prompt and of a lane, for each mode: of the values, and of the time.
DECODE_SIZES = {"gpu": ((4, 8, 600, 300), (16, 16, 2048, 512)), "interpreter": ((2, 3, 20, 9), None)}
SAMPLE_SIZES = {"gpu": ((64, 151_936), (256, 151_936)), "interpreter": ((5, 150), None)}  # R and V
DECODE_ERROR = 1.2  # times the error of PyTorch's own attention
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
NEAR = 1e-6  # of top_p or min_p: rounding decides about tokens as near as that to a filter's boundary
INTERVAL_SLACK = 1e-5  # of the cumulative probability, in which a draw's uniform may miss the token's interval
CLEAR_MASS = 5e-6  # where a boundary decides about more mass than that, both intervals are right

Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def kept_tokens(logits: torch.Tensor, temperature: float, filters: dict[str, float]) -> torch.Tensor:
    """Return which tokens the filters keep, [R, V] bool, by the reference.

    Args:
        logits: [R, V].
        temperature: T.
        filters: Those of top_k, top_p and min_p that are on.
    """
    return reference._kept(logits, temperature, **(OFF | filters))


def draw_errors(
    drawn: Drawn, logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float, **filters: float
) -> tuple[dict[str, tuple[float, float]], float]:
    """Compare the tokens, log-probs and kept mass of `sample` with fp64.

    The drawn token's interval of the distribution must hold the uniform. Where a filter's boundary lies so close to a
    token that rounding decides (1e-6 of top_p or min_p either way), both sides are right; where that moves the mass by
    more than 5e-6, the interval is not looked at.

    Args:
        drawn: What `sample` returned.
        logits: [R, V] fp32.
        uniforms: [R] fp32.
        temperature: T; 0 is greedy.
        filters: Those of top_k, top_p and min_p that are on.
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
    members: Sequence[Sequence[int]], prompt_lengths: Sequence[int], lengths: Sequence[int], *, heads: tuple[int, int],
    depth: int, dtype: torch.dtype = torch.float32, layout: str = "KC", device: str | torch.device = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Draw arguments of group_decode, with two slots more than there are lanes.

    Args:
        members: The lanes of each prompt, -1 where there is none; empty for no prompts.
        prompt_lengths: Tokens of each prompt.
        lengths: Own tokens of each lane.
        heads: H and K.
        depth: d.
        dtype: Dtype of queries, keys and values.
        layout: That of the memory: "KC" is [slots, K, tokens, d], "CK" is [slots, tokens, K, d], and "mixed" has keys
            in the one and values in the other.
        device: Where the tensors lie.
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


def lane_attention(case: dict[str, Any], lane: int) -> torch.Tensor:
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


def decode(place: Place, heads_of: tuple[int, int], depth: int) -> Trial | None:
    """Make the trial of one decode step's attention."""
    size = place.size(DECODE_SIZES)
    if size is None:
        return None
    prompts, group, prompt_tokens, tokens = size
    lanes = prompts * group
    members = torch.arange(lanes).view(prompts, group)
    own = torch.full((lanes,), tokens)
    if not place.timed:  # ragged, with a lane that has no prompt
        members[0, 0] = -1
        own = torch.randint(1, tokens + 1, (lanes,), generator=torch.Generator().manual_seed(0))
    case = random_decode(
        members.tolist(), [prompt_tokens] * prompts, own.tolist(), heads=heads_of, depth=depth, dtype=place.dtype,
        device=place.device,
    )  # fmt: skip
    whole = [
        torch.cat([case[f"prompt_{name}"].repeat_interleave(group, 0), case[name][:lanes]], dim=2)
        for name in ("keys", "values")
    ]

    def judge(values: Tensor) -> dict[str, tuple[float, float]]:
        exact = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in case.items()}
        true = reference.group_decode(**exact)
        simple = torch.stack([lane_attention(case, lane) for lane in range(lanes)])
        allowed = DECODE_ERROR * relative_error(simple, true) + SLACK
        return {"output": (relative_error(values, true), allowed)}

    def plain() -> Tensor:
        query = case["query"][:, :, None]
        return torch.nn.functional.scaled_dot_product_attention(query, *whole, scale=case["scale"], enable_gqa=True)

    read = 2 * (prompts * prompt_tokens + int(own.sum())) * heads_of[1] * depth * place.dtype.itemsize
    return Trial(lambda: group_decode(**case), plain, judge, bytes=read)


def draws(place: Place, temperature: float = 0.8, **filters: float) -> Trial | None:
    """Make the trial of drawing one token for each lane."""
    size = place.size(SAMPLE_SIZES)
    if size is None:
        return None
    generator = torch.Generator(place.device).manual_seed(0)
    logits = torch.randn(*size, device=place.device, generator=generator) * 2.5
    uniforms = torch.rand(size[0], device=place.device, generator=generator)
    options = {"temperature": temperature, **filters}
    return Trial(
        lambda: sample(logits, uniforms, **options),
        lambda: reference.sample(logits, uniforms, **options),
        lambda drawn: draw_errors(drawn, logits, uniforms, **options)[0],
        bytes=4 * logits.numel(),
    )
