"""The fused loss: head, log-prob and policy loss in one pass over the vocabulary, with the gradients of all three.

    hidden -> z = softcap(H W^T + b) / T -> logp -> policy loss -> g = dloss/dlogp, h = dloss/dentropy
    v E = dz,   dH = v (E W),   dW = E^T (v H),   dbias = E^T v          (E and v: linear_logprob.py)

A GRPO gradient is separable by token: g is known as soon as logp is. The exponentials that the forward computes are
therefore the backward's operands, and the whole is three products. It takes one of three forms:

- One chunk (M <= chunk_rows): E is kept, and both products of the gradient run in the backward. Nothing is wasted under
  no_grad or in a checkpointed region, and dW comes in the weight's dtype.
- More tokens than a chunk holds: the forward goes chunk by chunk, forms the gradients at once and sums dW in fp32. A
  sequence-level factor needs all log-probs of its sequence: chunks then end where sequences end, and a sequence that is
  longer than a chunk costs a forward-only pass over all tokens.
- fp16 and fp32, and an entropy bonus under a soft-cap: g and h are kept, and the backward recomputes E: four products.

With a tolerance (head_columns.py), the last two products run over fewer columns of the vocabulary. fp16 and fp32 then
recompute E in the forward already, chunk by chunk, because the metrics say what was left out.

Shapes: N rows of hidden states (tokens), M <= N kept ones, V vocabulary, D hidden size, S sequences.
"""

from typing import Any

import torch

from fastgrpo.kernels import launch
from fastgrpo.kernels.first_order import first_order
from fastgrpo.kernels.head_columns import head_columns_, head_shares
from fastgrpo.kernels.head_gradients import HeadGradients, grad_dtype, head_products, wanted
from fastgrpo.kernels.linear_logprob import (
    PATHS,
    chunk_slices,
    head_entropy_bwd_,
    linear_logprob_bwd,
    linear_logprob_fwd,
)
from fastgrpo.kernels.policy_loss import policy_loss_fwd
from fastgrpo.kernels.policy_rows import PolicyRows, cut, policy_parts
from fastgrpo.kernels.products import needed


class LinearGRPO(torch.autograd.Function):
    """Returns the loss, an fp32 scalar, and a dict of [M] values: logps, metrics, and on request the entropy.

    Only the loss is differentiable. `needs` says which of hidden, weight and bias need a gradient, because
    ctx.needs_input_grad stays True under no_grad.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, objective, needs, return_entropy, softcap, anchored, chunk_rows,
                group, tolerance):  # fmt: skip
        ctx.set_materialize_grads(False)
        bonus = rows.entropy_weights
        with_entropy = return_entropy or bonus is not None
        per_row = isinstance(rows.temperature, torch.Tensor)
        t, ts = (1.0, rows.temperature) if per_row else (float(rows.temperature), None)

        def head_fwd(part, keep):
            h = _gather(hidden, rows.index, rows.active, part)
            stats, exps = linear_logprob_fwd(h, weight, bias, rows.targets[part], t, cut(ts, part), softcap, anchored,
                                             keep, with_entropy, chunk_rows, group, not tolerance)  # fmt: skip
            return h, stats, exps

        m = len(rows.targets)
        keeps = any(needs) and anchored and (bonus is None or softcap is None)
        everything = slice(0, m)
        ctx.form, known = "one", None
        parts = [(everything, slice(None))]
        within = tolerance > 0 and any(needs)
        if (keeps and m > chunk_rows) or (within and not keeps):
            ctx.form = "many"
            slices = chunk_slices(m, chunk_rows)
            parts, known = policy_parts(
                rows, objective, slices, chunk_rows, policy_loss_fwd, lambda: head_fwd(everything, False)[1][0]
            )
        elif not keeps:
            ctx.form = "recompute" if any(needs) else "none"
        grads = HeadGradients(m, weight, needs, group, scaled=True) if ctx.form == "many" else None
        outputs = []
        for part, sequences in parts:
            h, stats, exps = head_fwd(part, keeps)
            columns = count = None
            if known is None:
                loss, g, metrics = policy_loss_fwd(stats[0], rows.cut(part, sequences), objective)
            else:
                loss, g = known[0][part], known[1][part]
                metrics = {name: values[part] for name, values in known[2].items()}
            part_bonus = cut(bonus, part)
            if part_bonus is not None:
                loss = loss - part_bonus * stats[1]  # - sum_n e_n H_n
            v, left_out = g, {}
            if within:
                located, part_ts = rows.targets[part], cut(ts, part)
                if not keeps:
                    exps, stats = head_shares(h, weight, bias, located, t, part_ts, softcap, stats)
                columns, count, kept, dropped = head_columns_(exps, located, stats, g, t, part_ts, softcap, tolerance,
                                                              group)  # fmt: skip
                left_out = {"kept_columns": kept.expand(len(g)), "dropped_mass": dropped}
                v = g * stats[3]
            elif keeps:
                v = g * stats[3]
                if part_bonus is not None:
                    head_entropy_bwd_(exps, rows.targets[part], stats, g, -part_bonus)
                    v = stats[3]
            if grads is not None:
                grads.add(exps, v, h, columns, count)
                exps = None  # freed before the next chunk allocates its own: one chunk of exponentials at a time
            outputs.append(
                {"loss": loss, "logps": stats[0], **({"entropy": stats[1]} if with_entropy else {}), **metrics,
                 **left_out}
            )  # fmt: skip
        if ctx.form == "one":
            ctx.save_for_backward(hidden, weight, bias, rows.index, rows.active, exps, v, columns, count)
        elif ctx.form == "many":
            ctx.save_for_backward(rows.index, *grads.sums())
            ctx.dtypes = (hidden.dtype, grad_dtype(weight), None if bias is None else grad_dtype(bias))
        elif ctx.form == "recompute":
            ctx.save_for_backward(hidden, weight, bias, rows.index, rows.active, rows.targets, ts, stats, g, bonus)
        ctx.options = (needs, t, softcap, chunk_rows, grad_dtype(weight), group, hidden.shape)
        merged = {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}
        return merged.pop("loss").sum(dtype=torch.float64).float(), merged

    @staticmethod
    @first_order("linear_grpo_loss")
    def backward(ctx, grad_loss, _):
        if grad_loss is None:
            return (None,) * 12
        needs, t, softcap, chunk_rows, weight_dtype, group, shape = ctx.options
        saved = ctx.saved_tensors  # read once: a checkpointed region hands them out once
        if ctx.form == "many":
            # Out of place: the saved sums may be asked for again (retain_graph). One pass each: scaled and rounded.
            index, *sums = saved
            dh, dw, db = (
                None if x is None else torch.mul(x, grad_loss, out=torch.empty_like(x, dtype=dtype))
                for x, dtype in zip(sums, ctx.dtypes, strict=True)
            )
            return _scatter(dh, index, shape), dw, db, *(None,) * 9
        hidden, weight, bias, index, active = saved[:5]
        h = _gather(hidden, index, active, slice(None))
        if ctx.form == "one":
            exps, v, columns, count = saved[5:]
            gradients = head_products(exps, v * grad_loss, h, weight, list(needs), weight_dtype, group, columns, count)
        else:
            targets, ts, stats, g, bonus = saved[5:]
            entropy_grad = None if bonus is None else -bonus * grad_loss
            gradients = linear_logprob_bwd(h, weight, bias, targets, t, ts, softcap, stats, g * grad_loss, entropy_grad,
                                           list(needs), weight_dtype, chunk_rows, group)  # fmt: skip
        dh, dw, db = wanted(gradients, needs, needs[2] and grad_dtype(bias))
        return _scatter(dh, index, shape), dw, db, *(None,) * 9


def _gather(hidden, index, active, part):
    """Return the kept hidden states of a slice, 0 where not active: v = 0 does not protect dW from a NaN."""
    h = hidden[part] if index is None else hidden[index[part]]
    return h if active is None else h.masked_fill_(~active[part][:, None], 0)


def _scatter(dh, index, shape):
    """Return dH of all tokens [N, D] from dH of the kept ones [M, D]."""
    return dh if dh is None or index is None else dh.new_zeros(shape).index_copy_(0, index, dh)


def linear_grpo_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: PolicyRows,
    objective: Any,
    *,
    return_entropy: bool = False,
    softcap: float | None = None,
    group: str | None = None,
    path: str | None = None,
    chunk_rows: int = launch.CHUNK_ROWS,
    tolerance: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss from hidden states, differentiably.

        loss = sum_n w_n (I_n s_n + beta KL_n) - sum_n e_n H_n

    Args:
        hidden: [N, D] bf16, fp16 or fp32.
        weight: [V, D] in the dtype of hidden.
        bias: [V] or None.
        rows: The M kept tokens; e_n are its entropy weights.
        objective: An Objective.
        return_entropy: Whether the entropy is returned.
        softcap: Cap of the logits, or None.
        group: Name of the process group of a sharded weight, with targets as `Vocabulary.located` gives them, or None.
        path: "anchored" or "recompute". None chooses by the dtype of hidden.
        chunk_rows: The most tokens whose exponentials are held at once.
        tolerance: Which share of a row's gradient may be left out (head_columns.py); 0 with entropy weights.

    Returns:
        The loss, a scalar; and log-probs and metrics by name, [M] each, with the entropy on request. With a tolerance,
        and where there is a gradient, also `kept_columns`, the share of its chunk, and `dropped_mass`.
    """
    needs = needed(hidden, weight, bias)
    anchored = (path or PATHS[hidden.dtype]) == "anchored"
    return LinearGRPO.apply(
        hidden, weight, bias, rows, objective, needs, return_entropy, softcap, anchored, chunk_rows, group,
        tolerance,
    )  # fmt: skip
