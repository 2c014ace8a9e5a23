"""`triton_grpo_loss` with the signature and the results of Liger-Kernel 0.8.5, computed by `logits_grpo_loss`.

The loss of each token is returned, or their sum under the weights of the loss type. Either way the forward reads the
logits and keeps vectors over the tokens, and the backward reads them again: with dloss [B, T], the gradient that each
token's loss receives, the gradient of the logits is that of our loss with dloss as its `token_weights`. Up to the
backward the logits are as they were, also where it then writes over them.

Shapes: B sequences, T tokens of each (padded), V vocabulary. There are T + 1 rows of logits a sequence, as a model
returns them; the last is not read, so here the tokens get one more column, which the mask leaves out.
"""

import torch

from fastgrpo.integrations.liger_terms import Terms, objective_of, step_tokens, translate
from fastgrpo.kernels.objectives import compute_dtype, first_order, policy_loss_fwd
from fastgrpo.loss.inputs import TokenInputs
from fastgrpo.loss.losses import logits_grpo_loss
from fastgrpo.loss.rows import keep_rows

Tensor = torch.Tensor


def triton_grpo_loss(
    logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
    completion_mask: Tensor | None = None, temperature: float = 0.9, beta: float = 0.04, eps_low: float = 0.2,
    eps_high: float = 0.4, inplace: bool = True, loss_type: str = "dapo", max_completion_length: int | None = None,
    importance_sampling_level: str = "token", reduce: bool = False, sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
    use_bias_correction_kl: bool = False, num_items_in_batch: float | Tensor | None = None, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, Tensor | None, Tensor] | tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Compute the GRPO loss of logits, per token or reduced, as Liger-Kernel 0.8.5 has it under this name.

    Args:
        logits: [B, T + 1, V] floating point, before the temperature.
        old_logp: [B, T] log-probs under the policy that drew the tokens, or None where they equal the current ones.
        ref_logp: [B, T] log-probs under the reference, needed where beta is not 0.
        completion_ids: [B, T] integers.
        advantages: [B]; [B, T] is taken too.
        completion_mask: [B, T], 0 where a token does not count; None is everywhere.
        temperature: Temperature of the softmax.
        beta: Coefficient of the KL to the reference (k3).
        eps_low: The ratio is clipped to at least 1 - eps_low.
        eps_high: The ratio is clipped to at most 1 + eps_high; for cispo the cap on the ratio itself.
        inplace: Whether the backward writes the gradient over the logits, so that there is no second tensor of their
            size.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo" or "vespo".
        max_completion_length: The constant length that dr_grpo divides by; None is T.
        importance_sampling_level: "token" or "sequence". Cispo and sapo take the ratio of a sequence here too.
        reduce: Whether the losses of the tokens are summed under the weights of the loss type.
        sapo_temperature_pos: Temperature of SAPO's gate for tokens with a positive advantage.
        sapo_temperature_neg: Temperature of SAPO's gate for all other tokens.
        vllm_is_ratio: [B, T], [B, 1] or [B]: weight of the surrogate against the sampler, or None.
        delta: Upper bound on the unclipped ratio, or None.
        use_bias_correction_kl: Whether the KL is multiplied by the ratio.
        num_items_in_batch: Tokens of the whole step on all processes, or None for those of this call on all processes.
        vespo_k_pos: k of VESPO's weight for tokens with advantage >= 0.
        vespo_lambda_pos: lambda of VESPO's weight for tokens with advantage >= 0.
        vespo_k_neg: k of VESPO's weight for tokens with a negative advantage.
        vespo_lambda_neg: lambda of VESPO's weight for tokens with a negative advantage.

    Returns:
        With `reduce` the loss and a list of means over the tokens: [kl, clip_ratio], or [clip_ratio] where beta is 0.
        Otherwise [B, T] each, 0 outside of the mask: the loss of the tokens, which alone carries gradient; their KL, or
        None where beta is 0; and 1 where the ratio is clipped, else 0.

    Raises:
        ValueError: A shape does not fit, or a setting is refused by `Objective` or `logits_grpo_loss`.
    """
    if (
        completion_ids.ndim != 2
        or logits.ndim != 3
        or logits.shape[:2] != (len(completion_ids), completion_ids.shape[1] + 1)
    ):
        raise ValueError(
            f"logits must be [B, T + 1, V] for completion_ids [B, T], got {tuple(logits.shape)} for "
            f"{tuple(completion_ids.shape)}"
        )
    batch, length = completion_ids.shape
    mask = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    objective = objective_of(
        loss_type, eps_high, epsilon=eps_low, delta=delta, beta=beta,
        max_completion_length=length if max_completion_length is None else max_completion_length,
        importance_sampling_level=importance_sampling_level, use_bias_correction_kl=use_bias_correction_kl,
        sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg, vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos, vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg,
    )  # fmt: skip
    terms = translate(objective, eps_high, advantages, mask, old_logp, vllm_is_ratio)
    loss, kl, clipped = TokenLosses.apply(logits, completion_ids, mask, ref_logp, temperature, terms, inplace)
    if not reduce:
        return loss, kl if beta != 0.0 else None, clipped
    starts = torch.arange(batch + 1, device=mask.device) * length
    items = step_tokens(objective, mask, num_items_in_batch)
    weights = objective.token_weights(mask.flatten(), starts, items, loss.dtype).view(mask.shape)
    tokens = mask.sum().clamp(min=1)
    metrics = [value.sum() / tokens for value in (kl, clipped)]
    return (loss * weights).sum(), metrics if beta != 0.0 else metrics[1:]


class TokenLosses(torch.autograd.Function):
    """Returns loss, KL and clipping of each token [B, T], of which the loss is differentiable by the logits."""

    @staticmethod
    def forward(ctx, logits, completion_ids, mask, ref_logp, temperature, terms, inplace):
        ctx.set_materialize_grads(False)
        inputs = _inputs(completion_ids, mask, ref_logp, temperature, terms)
        logps = _loss(logits.detach(), inputs, terms).logps.flatten()
        kept = keep_rows(inputs, terms.objective, compact=False, dtype=compute_dtype(logits))
        logps = logps if kept.index is None else logps[kept.index]
        loss, _, metrics = policy_loss_fwd(logps, kept, terms.objective)
        clipped = (metrics["clipped_low"] | metrics["clipped_high"]).to(loss.dtype)
        ctx.save_for_backward(logits)
        ctx.inputs, ctx.terms, ctx.inplace = inputs, terms, inplace

        def spread(values):
            values = values if kept.index is None else torch.zeros_like(values).index_copy_(0, kept.index, values)
            return values.view(inputs.mask.shape)[:, :-1].contiguous()

        loss, kl, clipped = map(spread, (loss, metrics["kl"] * terms.kl_scale, clipped))
        if terms.all_clipped:
            clipped = ((inputs.advantages[:, :-1] > 0) & mask).to(loss.dtype)
        ctx.mark_non_differentiable(kl, clipped)
        return loss, kl, clipped

    @staticmethod
    @first_order("triton_grpo_loss")
    def backward(ctx, dloss, *_):
        if dloss is None:
            return (None,) * 7
        (logits,) = ctx.saved_tensors
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            out = _loss(leaf, ctx.inputs._replace(token_weights=_wider(dloss)), ctx.terms, inplace=ctx.inplace)
            (grad,) = torch.autograd.grad(out.loss, leaf)
        return grad, *(None,) * 6


def _wider(values):
    """Add a column of zeros to [B, T]; None passes."""
    return None if values is None else torch.nn.functional.pad(values, (0, 1))


def _inputs(completion_ids, mask, ref_logp, temperature, terms: Terms):
    """What the losses are told of the tokens, [B, T + 1], with weights of 1."""
    advantages = terms.advantages if terms.advantages.ndim == 2 else terms.advantages[:, None].expand(mask.shape)
    mask = _wider(mask)
    return TokenInputs(
        _wider(completion_ids), _wider(advantages), mask, old_logps=_wider(terms.old_logps),
        ref_logps=None if ref_logp is None else _wider(ref_logp.detach()), sampler_logps=_wider(terms.sampler_logps),
        token_weights=mask.to(advantages.dtype), temperature=temperature,
    )  # fmt: skip


def _loss(logits, inputs, terms, inplace=False):
    fields = {name: value for name, value in inputs._asdict().items() if value is not None}
    return logits_grpo_loss(
        logits, fields.pop("targets"), fields.pop("advantages"), **fields, inplace=inplace, objective=terms.objective
    )
