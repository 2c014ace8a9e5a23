"""Sampling: draws a token from logits, and computes its log-prob.

Shapes: S completions, V vocabulary.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fastgrpo.loss.objective import TEMPERATURE, Interval

BOUNDS = {
    "temperature": TEMPERATURE._replace(why="logits are divided by it, and 0 is greedy"),
    "top_p": Interval(above=0, at_most=1),
    "top_k": Interval(at_least=0),
    "min_p": Interval(at_least=0, at_most=1),
    "repetition_penalty": Interval(above=0),
    "max_tokens": Interval(at_least=1),
}
# The check of the sampling kernels: number of lanes, and how far a random number may lie outside its token's interval.
# Sums of 152k probabilities in fp32 have an error of about 1e-6.
CHECKED_DRAWS, MISSED, MISSED_BY_FILTERS = 64, 1e-5, 5e-3
BLOCK = 128  # tokens whose probabilities are summed first; it divides the vocabularies of Llama, Qwen and SmolLM
OFF = (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))  # the filters, and the values that turn them off


def integer(value: Any, name: str) -> int:
    """Convert to an integer, or raise a ValueError."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None


def integers(values: Any, name: str) -> list[int]:
    """Convert to a list of integers, or raise a ValueError."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise ValueError(f"{name} must be a list of integers, got {repr(values)[:80]}") from None


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, under vLLM's names.

    Attributes:
        temperature: Divides the logits. 0 draws the likeliest token (greedy).
        top_p: Draw from the smallest set of likeliest tokens with this total probability; 1 is off.
        top_k: Draw from this many likeliest tokens; 0 is off.
        min_p: Draw from tokens with at least this share of the likeliest one's probability; 0 is off.
        max_tokens: Maximum number of tokens of a completion.
        stop_token_ids: Tokens that end a completion, or None.
        seed: Seed of the draws, any integer. None draws one from torch's global generator.
        repetition_penalty: Divides the positive logits of tokens in the prompt or completion, and multiplies the
            negative ones; 1 is off.

    Raises:
        ValueError: A value is out of range, or not an integer where one is needed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        stops = () if self.stop_token_ids is None else self.stop_token_ids
        object.__setattr__(self, "stop_token_ids", tuple(integers(stops, "stop_token_ids")))
        for name, bounds in BOUNDS.items():
            if name != "temperature" or self.temperature != 0:
                bounds.check(name, getattr(self, name))
        for name in ("top_k", "max_tokens", "seed"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, integer(getattr(self, name), name))

    @property
    def filters(self) -> bool:
        """Whether filters or a penalty change the sampling distribution, at a temperature above 0."""
        filters = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.temperature > 0 and (filters or self.penalizes)

    @property
    def differs(self) -> bool:
        """Whether the sampler's log-probs differ from the policy's. At temperature 0, only a penalty does this."""
        return self.filters or self.penalizes

    @property
    def penalizes(self) -> bool:
        """Whether the repetition penalty is on."""
        return self.repetition_penalty != 1

    @property
    def distribution(self) -> dict[str, float]:
        """The parameters of the sampling distribution, as keyword arguments of `sample` and `sample_penalized`."""
        names = ("temperature", "top_k", "top_p", "min_p", *(["repetition_penalty"] if self.penalizes else []))
        return {name: getattr(self, name) for name in names}


def uniforms(seed: int, request_id: int, count: int, length: int) -> torch.Tensor:
    """Return the random numbers of a request, [count, length] fp32 in [0, 1): one for each token of each completion.

    Philox (Salmon et al. 2011) is a counter-based generator, keyed here by seed and request. The number of a token
    also depends on its position and on count: number (completion, token) is the (token * count + completion)-th. So
    neither the rest of a batch nor the length limit changes a draw, but another group size does.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, request_id], np.uint64)))
    return torch.from_numpy(generator.random((length, count), dtype=np.float32)).T


def sample(
    logits: torch.Tensor,  # [S, V] fp32
    uniforms: torch.Tensor,  # [S] fp32 in [0, 1), at most 1 - 2**-24
    *,
    temperature: float = 1.0,  # 0 is greedy
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the next token of each completion, by the inverse of the cumulative distribution in vocabulary order.

    Returns the tokens [S] int64; their log-probs [S] fp32 under the full softmax at the temperature (at 1 when greedy),
    before filters, so that they can serve as the old policy's; and kept [S] fp32, the probability mass that the filters
    kept. A token was drawn with probability exp(logp) / kept. `SamplingParams` describes the filters.
    """
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return (_fused if logits.is_cuda and _trusts(logits, uniforms, how) else _plain)(logits, uniforms, **how)


def sample_penalized(
    logits: torch.Tensor,
    seen: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    repetition_penalty: float,
    temperature: float = 1.0,
    **filters: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw as `sample` does, with a repetition penalty on the tokens `seen` [S, V] before the filters.

    Log-probs are taken under the policy, without the penalty. Unlike in `sample`, kept may therefore exceed 1: the
    penalty makes some tokens less likely.
    """
    penalized = penalize(logits, seen, repetition_penalty)
    tokens, drawn, kept = sample(penalized, uniforms, temperature=temperature, **filters)
    scaled = logits if temperature in (0, 1) else logits / temperature
    logps = scaled.gather(-1, tokens[:, None])[:, 0] - scaled.logsumexp(-1)
    return tokens, logps, (logps - drawn).exp() * kept


def penalize(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Apply a repetition penalty (CTRL, arXiv 1909.05858) to the tokens `seen` [S, V], as transformers does.

    It divides positive logits, and multiplies negative ones.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _fused(logits, uniforms, **how):
    from fastgrpo.kernels.sampling import sample as fused

    return fused(logits, uniforms, **how)


def _trusts(logits, uniforms, how):
    """Return whether the sampling kernels pass the self-check. Each set of active filters is a variant."""
    from fastgrpo.loss.dispatch import trusted

    variant = {"vocabulary": logits.shape[1], "greedy": how["temperature"] == 0}
    variant |= {name: how[name] != off for name, off in OFF}
    return trusted("sample", logits.device, variant, lambda: draws_differ(logits, uniforms, how))


def draws_differ(logits: torch.Tensor, uniforms: torch.Tensor, how: dict[str, float]) -> str | None:
    """Compare the sampling kernels with the distribution in fp64. Return how they differ, or None.

    A token is correct if its interval of the cumulative distribution contains the random number, up to rounding. The
    tolerance is larger with filters, because rounding can move the filters' boundary past a token.
    """
    from fastgrpo.loss.dispatch import Unchecked, values_differ

    known = logits.isfinite().all(-1).nonzero()[:CHECKED_DRAWS, 0]  # rows with NaN cannot be compared
    if not len(known):
        raise Unchecked("no row of logits is finite")
    logits, uniforms = logits[known], uniforms[known]
    greedy, filters = how["temperature"] == 0, {name: how[name] for name, _ in OFF}
    try:
        all_logps = torch.log_softmax(logits.double() / (how["temperature"] or 1), dim=-1)
        probs = filter_logps(all_logps, **filters).exp()
        cumulative = probs.cumsum(-1)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Unchecked(f"PyTorch cannot compute the distribution ({error})") from error
    tokens, logps, kept = _fused(logits, uniforms, **how)

    def at_token(values):
        return values.gather(1, tokens[:, None])[:, 0]

    far = values_differ(logps, at_token(all_logps))
    if far:
        return f"log-probs {far}"
    if greedy:
        wrong = at_token(logits) != logits.amax(-1)
    else:
        far = values_differ(kept, cumulative[:, -1])
        if far:
            return f"the kept masses {far}"
        point, end = uniforms.double() * cumulative[:, -1], at_token(cumulative)
        missed = torch.maximum(point - end, end - at_token(probs) - point)
        wrong = missed > (MISSED if all(filters[name] == off for name, off in OFF) else MISSED_BY_FILTERS)
    return f"{wrong.sum().item()} of {len(wrong)} tokens do not match the random numbers" if wrong.any() else None


def _plain(logits, uniforms, *, temperature, top_k, top_p, min_p):
    scaled = logits if temperature in (0, 1) else logits / temperature
    probs = torch.softmax(scaled, dim=-1)
    # On a CPU torch's softmax adds thousands of fp32 numbers sequentially, so its results may have a common error of a
    # factor of 1 + 1e-5. Their sum is that factor.
    blocks = _blocks(probs)
    sums = blocks.sum(-1)
    total = sums.sum(-1)
    if temperature == 0:
        tokens, kept = logits.argmax(-1), torch.ones_like(uniforms)  # logits, since probabilities round to ties
    else:
        if top_k or top_p < 1 or min_p:
            filtered = filter_logps(torch.log_softmax(scaled, dim=-1), top_k=top_k, top_p=top_p, min_p=min_p)
            blocks = _blocks(probs.masked_fill(filtered == -torch.inf, 0))
            sums = blocks.sum(-1)
        tokens, kept = _inverse(blocks, sums, uniforms)
        tokens, kept = tokens.clamp_(max=logits.shape[-1] - 1), kept / total
    # log p = x - x_max + log p_max: as accurate as log-softmax, without writing another [S, V]
    logps = scaled.gather(-1, tokens[:, None])[:, 0] - scaled.amax(-1) + (probs.amax(-1) / total).clamp_(max=1).log_()
    return tokens, logps, kept


def _blocks(probs):
    """View probs [S, V] as blocks [S, V / BLOCK rounded up, BLOCK], padded with zeros."""
    missing = -probs.shape[1] % BLOCK
    return (F.pad(probs, (0, missing)) if missing else probs).unflatten(1, (-1, BLOCK))


def _inverse(blocks, sums, uniforms):
    """Return the tokens [S] at which the cumulative probabilities pass uniforms [S] times their sums, and these sums.

    First the sums [S, B] of the blocks [S, B, BLOCK] are cumulated, then the tokens of the selected block: two short
    sums are faster and more accurate than a long one. Tokens of probability 0 are never selected. NaN logits select the
    token after the last block.
    """
    rows, ends = torch.arange(len(blocks), device=blocks.device), sums.cumsum(-1)
    whole = ends[:, -1]
    point = uniforms * whole  # rounds below the whole for u <= 1 - 2**-24, so some block ends beyond it
    block = torch.searchsorted(ends, point[:, None], right=True)[:, 0].clamp_(max=ends.shape[1] - 1)
    within, before = blocks[rows, block].cumsum(-1), F.pad(ends, (1, 0))[rows, block]
    # The sum of the block may be rounded differently than in `ends`.
    point = torch.minimum(point - before, within[:, -1].nextafter(within.new_zeros(())))
    token = torch.searchsorted(within, point[:, None], right=True)[:, 0]
    return block * BLOCK + token, whole


def filter_logps(all_logps: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """Set log-probs [S, V] of the full softmax to -inf by top-k, top-p and min-p, as transformers does.

    Tokens of equal probability are kept or removed together: top-k keeps ties with its last token, and top-p ties with
    the token that completes its mass.
    """
    kept = all_logps
    if 0 < top_k < kept.shape[-1]:
        threshold = kept.topk(top_k, dim=-1).values[:, -1:]
        kept = kept.masked_fill(kept < threshold, -torch.inf)
    if top_p < 1:
        ordered = kept.sort(dim=-1, descending=True).values
        probs = torch.softmax(ordered, dim=-1)
        # A token is kept if the mass of the likelier ones is below top_p.
        stays = probs.cumsum(-1) - probs < top_p
        stays[..., 0] = True  # the likeliest one, even if fp32 rounds top_p to 0
        threshold = ordered.masked_fill(~stays, torch.inf).amin(-1, keepdim=True)
        kept = kept.masked_fill(kept < threshold, -torch.inf)
    if min_p > 0:
        floor = kept.amax(-1, keepdim=True) + math.log(min_p)
        kept = kept.masked_fill(kept < floor, -torch.inf)
    return kept
