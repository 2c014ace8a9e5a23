"""What Liger-Kernel's trainers say of a batch, in the terms of our losses: the settings, and the tensors.

Shapes: B sequences, T tokens of each (padded).
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fastgrpo.integrations.terms import READ, cap_below_1, shared_log_weights, vespo_knobs
from fastgrpo.kernels.objectives import Tokens, compute_dtype, vespo_phi
from fastgrpo.loss.objective import LOSS_TYPES, POSITIVE, Objective

Tensor = torch.Tensor


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
    if loss_type == "vespo":
        knobs |= vespo_knobs({name: knobs[name] for name in READ["vespo"] if name in knobs})
    return Objective(loss_type=loss_type, **knobs)


def translate(
    objective: Objective, epsilon_high: float, advantages: Tensor, mask: Tensor, old_logps: Tensor | None,
    ratio: Tensor | None,
) -> Terms:  # fmt: skip
    """Say what Liger is given of a batch in our terms.

    The importance weight I of a token is at least 0, and every surrogate but vespo's is linear in the advantage on each
    side of 0, so I s(A) = s(I A).

    Args:
        objective: What `objective_of` made.
        epsilon_high: Liger's, the cap where the loss is cispo.
        advantages: [B] or [B, T].
        mask: [B, T] bool.
        old_logps: [B, T], or None.
        ratio: I: [B, T], or [B, 1] or [B] for one of the whole sequence, or None.

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
    capped, gains, moved = cap_below_1(epsilon_high, objective, advantages, old_logps)
    scale = 1.0 if old_logps is None or not objective.use_bias_correction_kl else epsilon_high
    return Terms(capped, gains, moved, kl_scale=scale, all_clipped=old_logps is None)  # a ratio of 1 is above the cap


def _vespo(objective, advantages, mask, old_logps, ratio):
    """VESPO takes the weights into W, the product over the tokens that count; that of a whole sequence counts once."""
    ratio = ratio.masked_fill(~mask, 1) if ratio.shape == mask.shape else ratio
    log_ratio = shared_log_weights(ratio, mask).expand(mask.shape)
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
    """
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if ranks else 1
    if processes == 1 or LOSS_TYPES[objective.loss_type][1] != "step_tokens":
        return num_items_in_batch
    if num_items_in_batch is None:
        num_items_in_batch = mask.sum().float()
        torch.distributed.all_reduce(num_items_in_batch)
    return num_items_in_batch / processes
