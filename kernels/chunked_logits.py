"""The GRPO loss of given logits without Triton, with the results of reference.logits_grpo_loss.

Shapes: N rows (one a token), M <= N kept rows, V vocabulary. The forward reads the kept rows once and keeps vectors [M]
alone. The backward reads them again and computes dz = g dlogp/dz chunk by chunk, in fp32 in one buffer. It writes each
chunk into the one [N, V] tensor that autograd receives: a new one in the logits' dtype or, on request, the logits
themselves.
"""

import torch

from fastgrpo.kernels.chunked import row_slices
from fastgrpo.kernels.first_order import first_order
from fastgrpo.kernels.objectives import policy_loss_fwd
from fastgrpo.kernels.policy_rows import cut
from fastgrpo.kernels.products import compute_dtype, no_autocast
from fastgrpo.kernels.softmax import Vocabulary, logit_gradient_, softmax_


def _chunks(logits, rows, size):
    """Yield for each chunk its rows of the logits, its slice of the kept rows, and z = logits / T as a copy in fp32.

    fp64 logits are copied in fp64.
    """
    for part in row_slices(len(rows.targets), size):
        where = part if rows.index is None else rows.index[part]
        t = cut(rows.temperature, part)
        t = t[:, None] if isinstance(t, torch.Tensor) else t
        yield where, part, logits[where].to(compute_dtype(logits), copy=True).div_(t)


class LogitsGRPO(torch.autograd.Function):
    """Returns the loss of logits [N, V], a scalar, and a dict of [M]: log-probs, metrics, and on request the entropy.

    Only the loss is differentiable. With `inplace` the backward overwrites the logits with their gradient, and
    autograd refuses a second backward.
    """

    @staticmethod
    def forward(ctx, logits, rows, objective, size, return_entropy, inplace):
        ctx.set_materialize_grads(False)
        bonus = rows.entropy_weights
        return_entropy = return_entropy or bonus is not None
        vocabulary = Vocabulary(0, logits.shape[1], logits.shape[1], None)
        logps = torch.empty(len(rows.targets), dtype=compute_dtype(logits), device=logits.device)
        entropy = torch.empty_like(logps) if return_entropy else None
        with no_autocast(logits):
            for _, part, z in _chunks(logits, rows, size):
                logps[part], part_entropy = softmax_(z, rows.targets[part], vocabulary, return_entropy)
                del z  # free them before the next chunk's logits are allocated
                if return_entropy:
                    entropy[part] = part_entropy
            loss, g, metrics = policy_loss_fwd(logps, rows, objective)
        if bonus is not None:
            loss = loss - bonus * entropy  # - sum_n e_n H_n
        ctx.save_for_backward(logits, g, entropy)
        ctx.rows, ctx.size, ctx.vocabulary, ctx.inplace = rows, size, vocabulary, inplace
        outputs = {"logps": logps, **({"entropy": entropy} if return_entropy else {}), **metrics}
        return loss.sum(dtype=torch.float64).to(loss.dtype), outputs

    @staticmethod
    @first_order("logits_grpo_loss")
    def backward(ctx, grad_loss, _):
        if grad_loss is None:
            return (None,) * 6
        logits, g, entropy = ctx.saved_tensors
        rows = ctx.rows
        grad = logits if ctx.inplace else torch.empty_like(logits)
        with no_autocast(logits):
            for where, part, z in _chunks(logits, rows, ctx.size):
                t, targets = cut(rows.temperature, part), rows.targets[part]
                softmax_(z, targets, ctx.vocabulary)
                # The scalar multiplies first: divided by a temperature in fp32 it would not stay fp64.
                slope = None if rows.entropy_weights is None else -rows.entropy_weights[part] * grad_loss / t
                dz = logit_gradient_(z, targets, ctx.vocabulary, g[part] * grad_loss / t, cut(entropy, part), slope)
                grad[where] = dz.to(grad.dtype)
                del z, dz
        if rows.index is not None:
            dropped = torch.ones(len(grad), dtype=torch.bool, device=grad.device).index_fill_(0, rows.index, False)
            grad.masked_fill_(dropped[:, None], 0)
        return grad.detach(), None, None, None, None, None
