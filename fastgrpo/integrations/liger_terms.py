"""What Liger-Kernel's trainers say of a batch, in the terms of our losses: the settings, and the tensors.

Shapes: B sequences, T tokens of each (padded).
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fastgrpo.kernels.objectives import LOG_RATIO_MAX, LOG_WEIGHT_MIN, Tokens, vespo_phi
from fastgrpo.kernels.products import compute_dtype
from fastgrpo.loss.objective import LOSS_TYPES, POSITIVE, Objective

Tensor = torch.Tensor
# The surrogate -> the settings that only some surrogates read, and this one does.
READ = {
    "clip": ("epsilon", "epsilon_high"),
    "cispo": ("epsilon_high",),
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
}
LAMBDA_MIN = 1e-4  # Liger holds vespo's lambda above it


class Terms(NamedTuple):
    """A batch of Liger's in our terms.

    Attributes:
        objective: The objective to compute.
        advantages: [B] or [B, T], which carry the importance weights against the sampler and a cap below 1.
        old_logps: [B, T] or None.
        sampler_logps: [B, T], for vespo alone, or None.
        kl_scale: Liger's KL of a token is the objective's times this.
        all_clipped: Whether every token with a positive advantage counts as clipped, whatever its ratio.
    """

    objective: Objective
    advantages: Tensor
    old_logps: Tensor | None
    sampler_logps: Tensor | None = None
    kl_scale: float = 1.0
    all_clipped: bool = False


def objective_of(loss_type: str, epsilon_high: float, **knobs: Any) -> Objective:
    """Make the objective that Liger means by its settings.

    LUSPO with ratios per token, which `Objective` refuses by that name, is a sum over the tokens of a sequence and a
    mean over sequences: dr_grpo with the constant 1. A cap of CISPO below 1 is left to `translate`. A setting that the
    surrogate does not read may have any value, as in Liger.

    Args:
        loss_type: Liger's.
        epsilon_high: Liger's: the distance of the upper bound from 1, or the cap itself for cispo.
        knobs: Further fields of `Objective`.

    Returns:
        The objective.

    Raises:
        ValueError: `Objective` refuses a field, or the cap of cispo is not positive.
    """
    surrogate = LOSS_TYPES.get(loss_type, ("clip",))[0]
    if surrogate == "cispo":
        POSITIVE.check("epsilon_high", epsilon_high)
        epsilon_high = max(epsilon_high, 1.0)
    knobs["epsilon_high"] = epsilon_high
    unread = {name for names in READ.values() for name in names} - {*READ[surrogate]}
    knobs = {name: value for name, value in knobs.items() if name not in unread}
    if loss_type == "luspo" and knobs["importance_sampling_level"] == "token":
        loss_type, knobs = "dr_grpo", knobs | {"max_completion_length": 1}
    if loss_type == "vespo":  # its weights against the sampler are bounded inside of W alone
        knobs |= {name: max(knobs[name], LAMBDA_MIN) for name in READ["vespo"] if "lambda" in name and name in knobs}
        knobs |= {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": None}
    return Objective(loss_type=loss_type, **knobs)


def translate(
    objective: Objective, epsilon_high: float, advantages: Tensor, mask: Tensor, old_logps: Tensor | None,
    ratio: Tensor | None,
) -> Terms:  # fmt: skip
    """Say what Liger is given of a batch in our terms.

    The importance weight I of a token is at least 0, and every surrogate but vespo's is linear in the advantage on each
    side of 0, so I s(A) = s(I A). A cap c of CISPO below 1 is min(r, c) A = min(r / c, 1) c A: the old log-probs move
    by log c, and the advantages are multiplied by c.

    Args:
        objective: What `objective_of` made.
        epsilon_high: Liger's, the cap where the loss is cispo.
        advantages: [B] or [B, T].
        mask: [B, T] bool.
        old_logps: [B, T], or None.
        ratio: I: [B, T], or [B, 1] or [B] for one of the whole sequence, or None.

    Returns:
        The terms.

    Raises:
        ValueError: The ratio has another shape.
    """
    advantages = advantages.detach().to(compute_dtype(advantages))
    old_logps = None if old_logps is None else old_logps.detach().to(compute_dtype(old_logps))
    if ratio is not None:
        ratio = ratio.detach()[:, None] if ratio.ndim == 1 else ratio.detach()
        if ratio.shape not in (mask.shape, (len(mask), 1)):
            raise ValueError(
                f"vllm_is_ratio must be [B], [B, 1] or [B, T]={tuple(mask.shape)}, got {tuple(ratio.shape)}"
            )
        advantages = (advantages[:, None] if advantages.ndim == 1 else advantages).expand(mask.shape)
        if objective.surrogate == "vespo":
            return _vespo(objective, advantages, mask, old_logps, ratio)
        advantages = advantages * ratio
    if objective.surrogate != "cispo" or epsilon_high >= 1:
        return Terms(objective, advantages, old_logps)
    advantages = epsilon_high * advantages
    if old_logps is None:  # the ratio is 1, above the cap
        return Terms(objective, advantages, None, all_clipped=True)
    scale = 1.0
    if objective.use_bias_correction_kl:  # its factor r becomes r / c too
        scale, objective = epsilon_high, replace(objective, beta=epsilon_high * objective.beta)
    return Terms(objective, advantages, old_logps + math.log(epsilon_high), kl_scale=scale)


def _vespo(objective, advantages, mask, old_logps, ratio):
    """VESPO takes the weights into W, the product over the sequence; that of a whole sequence counts once."""
    log_ratio = ratio.log().clamp(LOG_WEIGHT_MIN, LOG_RATIO_MAX)
    if ratio.shape[1] == 1:
        log_ratio = log_ratio / mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio = log_ratio.expand(mask.shape)
    if old_logps is not None:
        return Terms(objective, advantages, old_logps, sampler_logps=old_logps - log_ratio)
    # Without old log-probs W is known: -phi(W) A logp is CISPO's loss for the advantages phi(W) A, its ratio being 1.
    importance = log_ratio.masked_fill(~mask, 0).exp().flatten()
    lengths = torch.full((len(mask),), mask.shape[1], device=mask.device)
    tokens = Tokens(None, torch.zeros_like(importance), None, advantages.flatten(), importance, lengths)
    phi = vespo_phi(tokens, objective).view(mask.shape)
    return Terms(replace(objective, loss_type="cispo", epsilon_high=1.0), advantages * phi, None)


def step_tokens(objective: Objective, mask: Tensor, num_items_in_batch: float | Tensor | None) -> float | Tensor | None:
    """Count the tokens of the step as Liger does, divided by the number of processes.

    Args:
        objective: The objective; where its weights do not read this count, no process asks the others.
        mask: [B, T] bool.
        num_items_in_batch: The tokens of all processes and micro-batches, or None for those of this call on all
            processes.

    Returns:
        What our losses take as `num_items_in_batch`.
    """
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if ranks else 1
    if processes == 1 or LOSS_TYPES[objective.loss_type][1] != "step_tokens":
        return num_items_in_batch
    if num_items_in_batch is None:
        num_items_in_batch = mask.sum().float()
        torch.distributed.all_reduce(num_items_in_batch)
    return num_items_in_batch / processes
