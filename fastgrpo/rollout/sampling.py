"""From logits to a token and its log-prob.

Shapes: R rows, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingParams:
    """How to draw, under vLLM's names.

    temperature: 0 is greedy. top_p: smallest set of tokens that holds this much probability; 1 is off. top_k: 0 is
    off. min_p: least probability relative to the likeliest token; 0 is off. max_tokens: of a completion.
    stop_token_ids: ids that end one. seed: of the draws; None takes torch's global state.

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
        for name, good, expected in (
            ("temperature", self.temperature >= 0, "at least 0 (0 is greedy)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "at least 0 (0 is off)"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
        ):
            if not good:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)}")


def sample(logits, params, generator=None):
    """Draw one token a row.

    Args:
        logits: [R, V] fp32. generator: torch.Generator on the same device, or None for the global one.

    Returns:
        tokens [R] int64; logps [R] fp32: their log-probs under the full softmax at the sampling temperature (at
        temperature 1 when greedy), whatever the filters cut, so that they can serve as the old policy's.
    """
    greedy = params.temperature == 0
    all_logps = torch.log_softmax(logits if greedy else logits / params.temperature, dim=-1)
    if greedy:
        tokens = all_logps.argmax(-1)
    else:
        probs = filter_logps(all_logps, params).exp()
        # Dividing by independent exponentials and taking the maximum draws from the (unnormalized) probabilities
        # without a host sync, unlike torch.multinomial: P(argmax p_i / e_i = k) = p_k / sum p.
        noise = torch.empty_like(probs).exponential_(generator=generator)
        tokens = (probs / noise).argmax(-1)
    return tokens, all_logps.gather(-1, tokens[:, None])[:, 0]


def filter_logps(all_logps, params):
    """Log-probs [R, V] with -inf where top-k, top-p or min-p cut, in this order, as transformers does."""
    kept = all_logps
    if 0 < params.top_k < kept.shape[-1]:
        threshold = kept.topk(params.top_k, dim=-1).values[:, -1:]
        kept = kept.masked_fill(kept < threshold, -torch.inf)
    if params.top_p < 1:
        ordered, order = kept.sort(dim=-1, descending=True)
        probs = torch.softmax(ordered, dim=-1)
        # A token stays while the mass of the likelier ones is below top_p: the likeliest always does.
        cut = probs.cumsum(-1) - probs >= params.top_p
        kept = kept.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    if params.min_p > 0:
        floor = kept.amax(-1, keepdim=True) + math.log(params.min_p)
        kept = kept.masked_fill(kept < floor, -torch.inf)
    return kept
