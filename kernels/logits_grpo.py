"""The GRPO loss of given logits, whose gradient may be written over the logits in one read and one write.

    logp = z_t - log sum_v exp(z_v),   z = logits / T,   dz_v = (g (1[v = t] - p_v) - h p_v (log p_v + H)) / T

In place, where no token looks at the others of its sequence, one kernel computes log-prob, loss and gradient of a token
and writes the latter over its logits. Otherwise the forward reads the logits and keeps vectors [M], and the backward
reads them again and writes the gradient, over the logits or into a new tensor. The kernels are in logits_rows.py.

Shapes: N rows of logits (tokens), M <= N kept ones, V vocabulary.
"""

from typing import Any

import torch

from fastgrpo.kernels import launch
from fastgrpo.kernels.first_order import first_order
from fastgrpo.kernels.logits_rows import logits_bwd, logits_bwd_, logits_grpo_, logits_stats, scale_rows_
from fastgrpo.kernels.objectives import importance_weights
from fastgrpo.kernels.policy_loss import GRAD, LOSS, kernel_knobs, policy_loss_fwd, policy_metrics
from fastgrpo.kernels.policy_rows import PolicyRows
from fastgrpo.kernels.products import needed

Tensor = torch.Tensor


def _places(index, active, total):
    """Return [N] places among the kept tokens, -1 where a token carries no gradient; None where all are kept."""
    if index is None:
        return None
    places = torch.arange(len(index), device=index.device)
    if active is not None:
        places = torch.where(active, places, -1)
    return torch.full((total,), -1, dtype=torch.int64, device=index.device).index_copy_(0, index, places)


class LogitsGRPO(torch.autograd.Function):
    """Returns the loss, a scalar, and a dict of [M] values: logps, metrics, and on request the entropy.

    Only the loss is differentiable. With `inplace`, the gradient overwrites the logits: in the forward if no token's
    loss depends on other tokens, and else in the backward. Autograd then refuses a second backward.
    """

    @staticmethod
    def forward(ctx, logits, rows, objective, return_entropy, inplace, needs):
        ctx.set_materialize_grads(False)
        bonus, ts = rows.entropy_weights, rows.temperature if isinstance(rows.temperature, torch.Tensor) else None
        t = 1.0 if ts is not None else float(rows.temperature)
        places = _places(rows.index, rows.active, len(logits))
        head = (places, rows.targets, t, ts)
        by_old = rows.sampler_logps is None or rows.old_logps is not None  # importance weights do not wait for logp
        ctx.written = inplace and needs and rows.lengths is None and by_old
        if ctx.written:
            importance, metrics = importance_weights(rows.old_logps, rows, objective)
            stats, out = logits_grpo_(logits, *head, rows.old_logps, rows.ref_logps, rows.advantages, rows.weights,
                                      importance, bonus, *kernel_knobs(objective))  # fmt: skip
            loss, g = out[LOSS], out[GRAD]
            metrics = {**metrics, **policy_metrics(out, rows.advantages, objective)}
        else:
            stats = logits_stats(logits, *head)
            loss, g, metrics = policy_loss_fwd(stats[0], rows, objective)
        if bonus is not None:
            loss = loss - bonus * stats[1]  # - sum_n e_n H_n
        if needs:
            ctx.save_for_backward(logits, places, rows.targets, ts, stats, g, bonus)
        ctx.t, ctx.inplace = t, inplace
        entropy = {"entropy": stats[1]} if return_entropy or bonus is not None else {}
        return loss.sum(dtype=torch.float64).float(), {"logps": stats[0], **entropy, **metrics}

    @staticmethod
    @first_order("logits_grpo_loss")
    def backward(ctx, grad_loss, _):
        if grad_loss is None:
            return (None,) * 6
        logits, places, targets, ts, stats, g, bonus = ctx.saved_tensors
        grad = logits.detach()
        if ctx.written:
            scale_rows_(grad, grad_loss)
        else:
            h = None if bonus is None else -bonus * grad_loss
            gradient = (logits_bwd_ if ctx.inplace else logits_bwd)(
                grad, places, targets, ctx.t, ts, stats, g * grad_loss, h
            )
            grad = grad if ctx.inplace else gradient
        return grad, *(None,) * 5


def logits_grpo_loss(
    logits: Tensor, rows: PolicyRows, objective: Any, *, return_entropy: bool = False, inplace: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss from logits, differentiably.

        loss = sum_n w_n (I_n s_n + beta KL_n) - sum_n e_n H_n

    Args:
        logits: [N, V] bf16, fp16 or fp32.
        rows: The M kept tokens; e_n are its entropy weights.
        objective: An Objective.
        return_entropy: Whether the entropy is returned.
        inplace: Whether the gradient takes the place of the logits.

    Returns:
        The loss, a scalar; and log-probs and metrics by name, [M] each, with the entropy on request.
    """
    logits = launch.rows_contiguous(logits)
    return LogitsGRPO.apply(logits, rows, objective, return_entropy, inplace, needed(logits)[0])
