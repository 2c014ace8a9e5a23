"""The GRPO loss from logits or log-probs in Triton, by the formulas of objectives.py.

Sequence-level values (mean log-ratio, importance weight, VESPO's phi) are computed by a few O(M) sums in PyTorch, and
passed per token. The gradient may overwrite the logits, in one read and one write:

    logp = z_t - log sum_v exp(z_v),   z = logits / T,   dz_v = (g (1[v = t] - p_v) - h p_v (log p_v + H)) / T

In place, for an objective per token, one kernel computes log-prob, loss and gradient of a token, and overwrites its
logits with the gradient. Otherwise the forward reads the logits and keeps vectors [M]; the backward reads the logits
again and writes the gradient, in place or to a new tensor.

Shapes: N rows of logits (tokens), M <= N kept ones, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch, objectives
from fastgrpo.kernels.launch import LN2, LOG2E, ROWS_VARY, log1p
from fastgrpo.kernels.objectives import (
    PolicyRows,
    first_order,
    importance_weights,
    kernel_knobs,
    needed,
    policy_metrics,
    token_loss,
)

Tensor = torch.Tensor
# Rows of the results [6, M] of `_loss_rows`.
LOSS, GRAD = 0, 1
POLICY_BLOCK = 256  # tokens per program, for given log-probs


@triton.jit
def _loss_rows(logp, rows, n_rows, old_ptr, log_ratio_ptr, ref_ptr, advantage_ptr, weight_ptr, importance_ptr, phi_ptr,
               out_ptr, low, high, delta, beta, tau_pos, tau_neg, SURROGATE: tl.constexpr, KIND: tl.constexpr,
               CORRECT_KL: tl.constexpr):  # fmt: skip
    """Store the results of `token_loss` for some tokens in out [6, M], and return their g. Pointers may be None."""
    ok = rows < n_rows
    old, log_ratio, ref, importance, phi = None, None, None, None, None
    if old_ptr is not None:
        old = tl.load(old_ptr + rows, mask=ok, other=0.0)
    if log_ratio_ptr is not None:
        log_ratio = tl.load(log_ratio_ptr + rows, mask=ok, other=0.0)
    if ref_ptr is not None:
        ref = tl.load(ref_ptr + rows, mask=ok, other=0.0)
    if importance_ptr is not None:
        importance = tl.load(importance_ptr + rows, mask=ok, other=0.0)
    if phi_ptr is not None:
        phi = tl.load(phi_ptr + rows, mask=ok, other=0.0)
    advantage = tl.load(advantage_ptr + rows, mask=ok, other=0.0)
    weight = tl.load(weight_ptr + rows, mask=ok, other=0.0)
    loss, grad, grad_ratio, policy, kl, ratio = token_loss(
        logp, old, log_ratio, ref, advantage, weight, importance, phi, SURROGATE, KIND, CORRECT_KL, low, high, delta,
        beta, tau_pos, tau_neg,
    )  # fmt: skip
    tl.store(out_ptr + rows, loss, mask=ok)
    tl.store(out_ptr + n_rows + rows, grad, mask=ok)
    tl.store(out_ptr + 2 * n_rows + rows, grad_ratio, mask=ok)
    tl.store(out_ptr + 3 * n_rows + rows, policy, mask=ok)
    tl.store(out_ptr + 4 * n_rows + rows, kl, mask=ok)
    tl.store(out_ptr + 5 * n_rows + rows, ratio, mask=ok)
    return grad


@triton.jit(**ROWS_VARY)
def _policy_loss_fwd_kernel(logp_ptr, old_ptr, log_ratio_ptr, ref_ptr, advantage_ptr, weight_ptr, importance_ptr,
                            phi_ptr, out_ptr, low, high, delta, beta, tau_pos, tau_neg, n_rows,
                            SURROGATE: tl.constexpr, KIND: tl.constexpr, CORRECT_KL: tl.constexpr,
                            BLOCK: tl.constexpr):  # fmt: skip
    """Compute the loss of one block of tokens."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    logp = tl.load(logp_ptr + rows, mask=rows < n_rows, other=0.0)
    _loss_rows(logp, rows, n_rows, old_ptr, log_ratio_ptr, ref_ptr, advantage_ptr, weight_ptr, importance_ptr, phi_ptr,
                out_ptr, low, high, delta, beta, tau_pos, tau_neg, SURROGATE, KIND, CORRECT_KL)  # fmt: skip


@launch.operator("fastgrpo::policy_loss_rows")
def policy_loss_rows(logps: Tensor, old: Tensor | None, log_ratio: Tensor | None,
                     ref: Tensor | None, advantages: Tensor, weights: Tensor,
                     importance: Tensor | None, phi: Tensor | None, surrogate: str, kl: str,
                     correct_kl: bool, low: float, high: float, delta: float | None, beta: float, tau_pos: float,
                     tau_neg: float) -> Tensor:  # fmt: skip
    """Run `token_loss` over all kept tokens [M].

    Without `old` and `log_ratio`, the ratio is 1; without `ref`, there is no KL; without `importance`, its weight is
    1. A given `log_ratio` replaces logps - old. `weights` include the mask and the whole aggregation, and `phi` are
    VESPO's weights. `low` and `high` bound the clipped ratio, `delta` the unclipped one. SAPO uses `tau_pos` for
    positive advantages, and `tau_neg` for others.

    The result is [6, M] fp32: the loss, g (without the gradient through a given log_ratio), the gradient through the
    log-ratio, the loss without its KL, the KL, and the ratio.
    """
    n = len(logps)
    out = logps.new_empty(6, n, dtype=torch.float32)
    if n:
        rows = (logps, old, log_ratio, ref, advantages, weights, importance, phi)
        assert all(x is None or x.shape == (n,) for x in rows), [None if x is None else x.shape for x in rows]
        rows = (None if x is None else x.float().contiguous() for x in rows)
        _policy_loss_fwd_kernel[(triton.cdiv(n, POLICY_BLOCK),)](
            *rows, out, low, high, delta, beta, tau_pos, tau_neg, n,
            SURROGATE=surrogate, KIND=kl, CORRECT_KL=correct_kl, BLOCK=POLICY_BLOCK, **launch.options(),
        )  # fmt: skip
    return out


@policy_loss_rows.register_fake
def _(logps, *_):
    return logps.new_empty(6, len(logps), dtype=torch.float32)


def policy_loss_fwd(logps: Tensor, rows: PolicyRows, objective: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compute the loss of each token and its gradient, as objectives.policy_loss_fwd does.

    Args:
        logps: [M] fp32 log-probs under the policy.
        rows: The kept tokens.
        objective: An Objective.

    Returns:
        loss [M], its weight applied; g [M] = d(sum loss)/dlogp; and the metrics [M] of objectives.policy_loss_fwd.
    """
    return objectives.policy_loss_fwd(logps, rows, objective, policy_loss_rows)


@triton.jit
def _row_place(place_ptr, row):
    """Return the place of a row among the kept ones, or -1. Without a map, every row is kept."""
    # A single return, because Triton also traces the code after a return inside a branch.
    if place_ptr is None:  # noqa: SIM108 - the condition is known at compile time, and only one branch is traced
        place = row
    else:
        place = tl.load(place_ptr + row)
    return place


@triton.jit
def _row_scale(inv_t, inv_t_ptr, row):
    """Return log2(e) / T of a row, as [1]."""
    scale = tl.full((1,), 1.0, tl.float32) * inv_t
    if inv_t_ptr is not None:
        scale = tl.load(inv_t_ptr + row)
    return scale * LOG2E


@triton.jit
def _row_stats(z_ptr, target, scale, vocab, BLOCK: tl.constexpr):
    """Return (logp, log2 sum_v exp(z_v), 1 - p_t, entropy) of a row, each [1], by an online softmax.

    The target's column is separate, so that a confident token's log-prob has full relative precision.
    """
    # Read the target's logit before the reductions and their barriers: after them, a faster warp may overwrite it with
    # the gradient.
    legal = (target >= 0) & (target < vocab)
    y2 = tl.load(z_ptr + target, mask=legal, other=float("nan")).to(tl.float32) * scale
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    entropy = tl.zeros((1,), tl.float32)
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        x2 = tl.load(z_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32) * scale[:, None]
        x2 = tl.where(cols == target[:, None], float("-inf"), x2)
        new_top = tl.maximum(top, tl.max(x2, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        e = tl.exp2(x2 - base[:, None])
        shrink = tl.exp2(top - base)
        entropy = (entropy + tl.where(total > 0, total * (top - base), 0.0)) * shrink
        entropy += tl.sum(e * tl.maximum(x2 - base[:, None], -1e30), axis=1)
        total = total * shrink + tl.sum(e, axis=1)
        top = new_top
    base = tl.maximum(top, y2)
    shrink = tl.exp2(top - base)
    entropy = (entropy + tl.where(total > 0, total * (top - base), 0.0)) * shrink
    total *= shrink
    gap = tl.where(base == y2, base * 0.0, y2 - base)  # exact, as in `_finish_fwd_kernel`
    target_e = tl.exp2(gap)
    norm = total + target_e
    log_norm = tl.where(base == y2, log1p(total), tl.log(norm))
    logp = gap * LN2 - log_norm
    entropy = log_norm - (entropy + target_e * tl.maximum(gap, -1e30)) * LN2 / norm
    return logp, base + tl.log2(norm), total / norm, entropy


@triton.jit
def _write_gradient(z_ptr, out_ptr, target, scale, lse2, rest, logp, entropy, g, h, vocab, BLOCK: tl.constexpr):
    """Write dz of one row, with lse2 = log2 sum_v exp(z_v) and rest = 1 - p_t. out may be the logits themselves.

    The columns are read from last to first, because the cache still has those that the first pass read last.
    """
    t = scale * LN2  # 1 / T
    last = tl.cdiv(vocab, BLOCK) - 1
    for i in range(0, last + 1):
        cols = (last - i) * BLOCK + tl.arange(0, BLOCK)[None, :]
        x2 = tl.load(z_ptr + cols, mask=cols < vocab, other=0.0).to(tl.float32) * scale[:, None]
        log_p2 = tl.maximum(x2 - lse2[:, None], -1e30)  # finite, since 0 * -inf would be NaN
        dz = -tl.exp2(log_p2) * (g + h * entropy + h * LN2 * log_p2)
        at_target = g * rest - h * tl.exp(logp) * (logp + entropy)
        dz = tl.where(cols == target[:, None], at_target[:, None], dz) * t[:, None]
        tl.store(out_ptr + cols, dz.to(out_ptr.dtype.element_ty), mask=cols < vocab)


@triton.jit(**ROWS_VARY)
def _logits_grpo_fwd_kernel(z_ptr, z_stride, place_ptr, target_ptr, inv_t, inv_t_ptr, stats_ptr, old_ptr, ref_ptr,
                            advantage_ptr, weight_ptr, importance_ptr, bonus_ptr, out_ptr, low, high, delta, beta,
                            tau_pos, tau_neg, n_rows, vocab, SURROGATE: tl.constexpr, KIND: tl.constexpr,
                            CORRECT_KL: tl.constexpr, FUSED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Compute the stats of one row and, if FUSED, its loss and gradient; rows that are not kept get zeros."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    rows = _row_place(place_ptr, row) + tl.zeros((1,), tl.int64)
    if place_ptr is not None:  # noqa: SIM102 - known at compile time, unlike the inner one
        if tl.max(rows) < 0:
            if FUSED:
                for start in range(0, vocab, BLOCK):
                    cols = start + tl.arange(0, BLOCK)
                    tl.store(z_ptr + cols, tl.zeros((BLOCK,), z_ptr.dtype.element_ty), mask=cols < vocab)
            return
    target = tl.load(target_ptr + rows)
    scale = _row_scale(inv_t, inv_t_ptr, rows)
    logp, lse2, rest, entropy = _row_stats(z_ptr, target, scale, vocab, BLOCK)
    tl.store(stats_ptr + rows, logp)
    tl.store(stats_ptr + n_rows + rows, entropy)
    tl.store(stats_ptr + 2 * n_rows + rows, lse2)
    tl.store(stats_ptr + 3 * n_rows + rows, rest)
    if FUSED:
        g = _loss_rows(logp, rows, n_rows, old_ptr, None, ref_ptr, advantage_ptr, weight_ptr, importance_ptr, None,
                        out_ptr, low, high, delta, beta, tau_pos, tau_neg, SURROGATE, KIND, CORRECT_KL)  # fmt: skip
        h = tl.zeros((1,), tl.float32)
        if bonus_ptr is not None:
            h = -tl.load(bonus_ptr + rows)
        _write_gradient(z_ptr, z_ptr, target, scale, lse2, rest, logp, entropy, g, h, vocab, BLOCK)


@triton.jit(**ROWS_VARY)
def _logits_grpo_bwd_kernel(z_ptr, z_stride, d_ptr, d_stride, place_ptr, target_ptr, inv_t, inv_t_ptr, stats_ptr, g_ptr,
                            h_ptr, n_rows, vocab, BLOCK: tl.constexpr):  # fmt: skip
    """Write the gradient of one row from its stats; rows that are not kept get zeros."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    d_ptr += row * d_stride
    rows = _row_place(place_ptr, row) + tl.zeros((1,), tl.int64)
    if place_ptr is not None:  # noqa: SIM102 - known at compile time, unlike the inner one
        if tl.max(rows) < 0:
            for start in range(0, vocab, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                tl.store(d_ptr + cols, tl.zeros((BLOCK,), d_ptr.dtype.element_ty), mask=cols < vocab)
            return
    h = tl.zeros((1,), tl.float32)
    if h_ptr is not None:
        h = tl.load(h_ptr + rows)
    _write_gradient(
        z_ptr, d_ptr, tl.load(target_ptr + rows), _row_scale(inv_t, inv_t_ptr, rows),
        tl.load(stats_ptr + 2 * n_rows + rows), tl.load(stats_ptr + 3 * n_rows + rows), tl.load(stats_ptr + rows),
        tl.load(stats_ptr + n_rows + rows), tl.load(g_ptr + rows), h, vocab, BLOCK,
    )  # fmt: skip


@triton.jit
def _scale_rows_kernel(d_ptr, d_stride, factor_ptr, vocab, BLOCK: tl.constexpr):
    """Multiply a row by a scalar on the device, in place and without a sync. A factor of 1 costs nothing."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor == 1.0:
        return
    d_ptr += tl.program_id(0).to(tl.int64) * d_stride
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        d = tl.load(d_ptr + cols, mask=cols < vocab, other=0.0).to(tl.float32) * factor
        tl.store(d_ptr + cols, d.to(d_ptr.dtype.element_ty), mask=cols < vocab)


def _options(warps=launch.LOGITS_WARPS):
    return {"BLOCK": 64 if launch.INTERPRET else launch.LOGITS_BLOCK, **launch.options(warps)}


def _launch_fwd(logits, places, targets, temperature, temperatures, out, policy_rows, bonus, knobs, fused):
    """Return stats [4, M]: logp, entropy, log2 sum_v exp(z_v) and 1 - p_t; 0 for inactive tokens."""
    n, vocab = logits.shape
    m = len(targets)
    stats = torch.zeros(4, m, dtype=torch.float32, device=logits.device)
    inverse = None if temperatures is None else temperatures.float().reciprocal()
    surrogate, kl, correct_kl, *floats = knobs
    _logits_grpo_fwd_kernel[(n,)](
        logits, logits.stride(0), places, targets, 1.0 / temperature, inverse, stats, *policy_rows, bonus, out, *floats,
        m, vocab, SURROGATE=surrogate, KIND=kl, CORRECT_KL=correct_kl, FUSED=fused,
        **_options(launch.LOGITS_FUSED_WARPS if fused else launch.LOGITS_WARPS),
    )  # fmt: skip
    return stats


@launch.operator("fastgrpo::logits_stats")
def logits_stats(logits: Tensor, places: Tensor | None, targets: Tensor, temperature: float,
                 temperatures: Tensor | None) -> Tensor:  # fmt: skip
    """Read the logits once, and compute the stats for loss and backward.

    The stats are [4, M] fp32: logp, entropy, log2 sum_v exp(z_v), and 1 - p_t. The logits have contiguous rows.
    `places` [N] is the place of each row among the kept tokens, or -1; None if all are kept.
    """
    if logits.shape[0] == 0:
        return logits.new_zeros(4, len(targets), dtype=torch.float32)
    knobs = ("clip", "k3", False, 0.0, 0.0, None, 0.0, 0.0, 0.0)
    return _launch_fwd(logits, places, targets, temperature, temperatures, None, (None,) * 5, None, knobs, False)


@logits_stats.register_fake
def _(logits, places, targets, temperature, temperatures):
    return logits.new_empty(4, len(targets), dtype=torch.float32)


@launch.operator("fastgrpo::logits_grpo_", mutates_args=("logits",))
def logits_grpo_(logits: Tensor, places: Tensor | None, targets: Tensor, temperature: float,
                 temperatures: Tensor | None, old: Tensor | None, ref: Tensor | None, advantages: Tensor,
                 weights: Tensor, importance: Tensor | None, bonus: Tensor | None, surrogate: str, kl: str,
                 correct_kl: bool, low: float, high: float, delta: float | None, beta: float, tau_pos: float,
                 tau_neg: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Read the logits once, compute the loss, and overwrite the logits with its gradient.

    For the first five arguments see `logits_stats`, for the others `policy_loss_rows`. `bonus` [M] are the weights of
    the entropy bonus, or None.

    It returns the stats of `logits_stats` [4, M], and the results of `policy_loss_rows` [6, M].
    """
    out = torch.zeros(6, len(targets), dtype=torch.float32, device=logits.device)
    if logits.shape[0] == 0:
        return torch.zeros_like(out[:4]), out
    rows = [None if x is None else x.float().contiguous() for x in (old, ref, advantages, weights, importance, bonus)]
    knobs = (surrogate, kl, correct_kl, low, high, delta, beta, tau_pos, tau_neg)
    stats = _launch_fwd(logits, places, targets, temperature, temperatures, out, rows[:5], rows[5], knobs, True)
    return stats, out


@logits_grpo_.register_fake
def _(logits, places, targets, *_):
    return (logits.new_empty(4, len(targets), dtype=torch.float32),
            logits.new_empty(6, len(targets), dtype=torch.float32))  # fmt: skip


@launch.operator("fastgrpo::logits_bwd", mutates_args=("out",))
def logits_bwd(logits: Tensor, places: Tensor | None, targets: Tensor, temperature: float, temperatures: Tensor | None,
               stats: Tensor, g: Tensor, h: Tensor | None, out: Tensor) -> None:  # fmt: skip
    """Write the gradient of the logits, from the gradients of log-prob and entropy.

    See `logits_stats` for `places` and `stats`. g and h [M] are fp32. `out` may be the logits themselves.
    """
    if len(logits) == 0:
        return
    inverse = None if temperatures is None else temperatures.float().reciprocal()
    _logits_grpo_bwd_kernel[(len(logits),)](
        logits, logits.stride(0), out, out.stride(0), places, targets, 1.0 / temperature, inverse, stats, g, h,
        len(targets), logits.shape[1], **_options(),
    )  # fmt: skip


@launch.operator("fastgrpo::scale_rows_", mutates_args=("matrix",))
def scale_rows_(matrix: Tensor, factor: Tensor) -> None:
    """Multiply a matrix with contiguous rows by a scalar on the device, in place; a factor of 1 costs nothing."""
    if len(matrix):
        _scale_rows_kernel[(len(matrix),)](matrix, matrix.stride(0), factor, matrix.shape[1], **_options())


def _places(index, active, total):
    """Return [N] places among the kept tokens, -1 for tokens without gradient; None if all are kept."""
    if index is None:
        return None
    places = torch.arange(len(index), device=index.device)
    if active is not None:
        places = torch.where(active, places, -1)
    return torch.full((total,), -1, dtype=torch.int64, device=index.device).index_copy_(0, index, places)


class LogitsGRPO(torch.autograd.Function):
    """Returns the loss, a scalar, and a dict of [M] values: logps, metrics, and on request the entropy.

    Only the loss is differentiable. With `inplace`, the gradient overwrites the logits: in the forward for an objective
    per token (not in fp16), else in the backward. Autograd then raises on a second backward.
    """

    @staticmethod
    def forward(ctx, logits, rows, objective, return_entropy, inplace, needs):
        ctx.set_materialize_grads(False)
        bonus = None if rows.entropy_weights is None else rows.entropy_weights.float()
        ts = rows.temperature if isinstance(rows.temperature, torch.Tensor) else None
        t = 1.0 if ts is not None else float(rows.temperature)
        places = _places(rows.index, rows.active, len(logits))
        head = (places, rows.targets, t, ts)
        by_old = rows.sampler_logps is None or rows.old_logps is not None  # importance weights do not need logp
        # An fp16 gradient is scaled before it is rounded, so the backward computes it.
        ctx.written = inplace and needs and rows.lengths is None and by_old and logits.dtype != torch.float16
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
            grad = grad if ctx.inplace else torch.empty_like(grad)
            logits_bwd(logits.detach(), places, targets, ctx.t, ts, stats, g * grad_loss, h, grad)
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
        return_entropy: Whether to return the entropy.
        inplace: Whether the gradient overwrites the logits.

    Returns:
        The loss, a scalar; and log-probs and metrics by name, [M] each, with the entropy on request.
    """
    logits = launch.rows_contiguous(logits)
    return LogitsGRPO.apply(logits, rows, objective, return_entropy, inplace, needed(logits)[0])
