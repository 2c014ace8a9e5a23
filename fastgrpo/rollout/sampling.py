"""From logits to a token and its log-prob.

Shapes: R rows, V vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class SamplingParams:
    """How to draw, under vLLM's names.

    temperature: 0 is greedy. top_p: smallest set of tokens that holds this much probability; 1 is off. top_k: 0 is
    off. min_p: least probability relative to the likeliest token; 0 is off. max_tokens: of a completion.
    stop_token_ids: ids that end one. seed: of the draws; None takes one from torch's global state.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, good, expected in (
            ("temperature", self.temperature >= 0, "at least 0 (0 is greedy)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "at least 0 (0 is off)"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
        ):
            if not good:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)}")

    @property
    def filters(self):
        """Whether a token may be cut: then the draws follow another distribution than the log-probs."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def distribution(self):
        """What decides the distribution of one token: the arguments of `sample`."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def uniforms(seed, request_id, count, length):
    """The random numbers of a request, [count, length] fp32 in [0, 1): one for each token of each completion.

    Philox (Salmon et al. 2011) is counter-based: keyed by (seed, request), the number of a completion's token depends
    on nothing else, so neither the order of a batch nor the length limit changes a draw.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, request_id], np.uint64)))
    return torch.from_numpy(generator.random((length, count), dtype=np.float32)).T


def sample(logits, uniforms, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Draw one token a row, by the inverse of the cumulative distribution in vocabulary order.

    Args:
        logits: [R, V] fp32. uniforms: [R] fp32 in [0, 1), at most 1 - 2**-24. temperature: 0 is greedy.

    Returns:
        tokens [R] int64; logps [R] fp32: their log-probs under the full softmax at the temperature (at 1 when greedy),
        whatever the filters cut, so that they can serve as the old policy's; kept [R] fp32: the probability that the
        filters left (1 without any): the draw's own probability is exp(logp) / kept.
    """
    if logits.is_cuda:
        from fastgrpo.kernels.sampling import sample as fused

        return fused(logits, uniforms, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    greedy = temperature == 0
    all_logps = torch.log_softmax(logits if greedy or temperature == 1 else logits / temperature, dim=-1)
    if greedy:
        tokens, kept = logits.argmax(-1), torch.ones_like(uniforms)  # the softmax would round near ties together
    else:
        filtered = filter_logps(all_logps, top_k=top_k, top_p=top_p, min_p=min_p)
        cumulative = filtered.exp().cumsum(-1)
        kept = cumulative[:, -1]
        # Of u <= 1 - 2**-24 the product with the total rounds below the total: the token has probability.
        tokens = torch.searchsorted(cumulative, (uniforms * kept)[:, None], right=True)[:, 0]
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)  # NaN logits: every comparison is false
    return tokens, all_logps.gather(-1, tokens[:, None])[:, 0], kept


def filter_logps(all_logps, *, top_k=0, top_p=1.0, min_p=0.0):
    """[R, V] log-probs, -inf where top-k, top-p or min-p cut, in this order, as transformers does.

    Equal tokens stay or go together: top-k keeps those that tie with its last, and top-p those that tie with the one
    that completes its mass.
    """
    kept = all_logps
    if 0 < top_k < kept.shape[-1]:
        threshold = kept.topk(top_k, dim=-1).values[:, -1:]
        kept = kept.masked_fill(kept < threshold, -torch.inf)
    if top_p < 1:
        ordered = kept.sort(dim=-1, descending=True).values
        probs = torch.softmax(ordered, dim=-1)
        # A token stays while the mass of the likelier ones is below top_p: the likeliest always does.
        stays = probs.cumsum(-1) - probs < top_p
        threshold = ordered.masked_fill(~stays, torch.inf).amin(-1, keepdim=True)
        kept = kept.masked_fill(kept < threshold, -torch.inf)
    if min_p > 0:
        floor = kept.amax(-1, keepdim=True) + math.log(min_p)
        kept = kept.masked_fill(kept < floor, -torch.inf)
    return kept
