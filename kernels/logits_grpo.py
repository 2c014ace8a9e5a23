"""The GRPO loss of logits that are already there: one read, one in-place write of their gradient.

    logp = z_t - log sum_v exp(z_v),   z = logits / T,   dz_v = (g (1[v = t] - p_v) - h p_v (log p_v + H)) / T

One program a row. In place, where no token looks at the others of its sequence, the program goes on from the row's
log-prob to its loss and gradient and writes the latter at once: its second read comes from the cache. Otherwise the
forward reads and keeps vectors [M], and the backward reads again and writes, over the logits or into a new tensor.

Shapes: N rows, M <= N kept rows, V vocabulary. All arithmetic is fp32. Rows are counted on the grid's first axis, which
ends at 2^31: N above 65,535 is fine.
"""

import torch
import triton
import triton.language as tl

from . import launch
from .head_rows import log1p
from .policy_loss import GRAD, LOSS, kernel_knobs, policy_loss_fwd, policy_metrics, policy_rows
from .tiles import LN2, LOG2E


@triton.jit
def _row_place(place_ptr, row):
    """Where among the kept rows a row stands; -1 is nowhere. No map: every row is kept."""
    if place_ptr is None:
        return row
    return tl.load(place_ptr + row)


@triton.jit
def _row_scale(inv_t, inv_t_ptr, row):
    """log2(e) / T as [1]."""
    scale = tl.full((1,), 1.0, tl.float32) * inv_t
    if inv_t_ptr is not None:
        scale = tl.load(inv_t_ptr + row)
    return scale * LOG2E


@triton.jit
def _row_stats(z_ptr, target, scale, vocab, BLOCK: tl.constexpr):
    """(logp, log2 sum, 1 - p_t, entropy), each [1]: an online softmax with the target's column apart."""
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    entropy = tl.zeros((1,), tl.float32)
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        x2 = tl.load(z_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32) * scale[:, None]
        x2 = tl.where(cols == target[:, None], float("-inf"), x2)
        new_top = tl.maximum(top, tl.max(x2, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN
        e = tl.exp2(x2 - base[:, None])
        shrink = tl.exp2(top - base)
        entropy = (entropy + tl.where(total > 0, total * (top - base), 0.0)) * shrink
        entropy += tl.sum(e * tl.maximum(x2 - base[:, None], -1e30), axis=1)
        total = total * shrink + tl.sum(e, axis=1)
        top = new_top
    legal = (target >= 0) & (target < vocab)
    y2 = tl.load(z_ptr + target, mask=legal, other=float("nan")).to(tl.float32) * scale
    base = tl.maximum(top, y2)
    shrink = tl.exp2(top - base)
    entropy = (entropy + tl.where(total > 0, total * (top - base), 0.0)) * shrink
    total *= shrink
    target_e = tl.exp2(y2 - base)
    norm = total + target_e
    log_norm = tl.where(base == y2, log1p(total), tl.log(norm))
    logp = (y2 - base) * LN2 - log_norm
    entropy = log_norm - (entropy + target_e * tl.maximum(y2 - base, -1e30)) * LN2 / norm
    return logp, base + tl.log2(norm), total / norm, entropy


@triton.jit
def _write_gradient(z_ptr, out_ptr, target, scale, lse2, rest, logp, entropy, g, h, vocab, BLOCK: tl.constexpr):
    """dz of one row; lse2 = log2 sum_v exp(z_v), rest = 1 - p_t. out may be the logits themselves."""
    t = scale * LN2  # 1 / T
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        x2 = tl.load(z_ptr + cols, mask=cols < vocab, other=0.0).to(tl.float32) * scale[:, None]
        log_p2 = tl.maximum(x2 - lse2[:, None], -1e30)  # finite: 0 * -inf is NaN
        dz = -tl.exp2(log_p2) * (g + h * entropy + h * LN2 * log_p2)
        at_target = g * rest - h * tl.exp(logp) * (logp + entropy)
        dz = tl.where(cols == target[:, None], at_target[:, None], dz) * t[:, None]
        tl.store(out_ptr + cols, dz.to(out_ptr.dtype.element_ty), mask=cols < vocab)


@triton.jit
def _logits_grpo_fwd_kernel(z_ptr, z_stride, place_ptr, target_ptr, inv_t, inv_t_ptr, stats_ptr, old_ptr, ref_ptr,
                            advantage_ptr, weight_ptr, importance_ptr, bonus_ptr, out_ptr, low, high, delta, beta,
                            tau_pos, tau_neg, n_rows, vocab, SURROGATE: tl.constexpr, KIND: tl.constexpr,
                            CORRECT_KL: tl.constexpr, FUSED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
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
        g = policy_rows(logp, rows, n_rows, old_ptr, None, ref_ptr, advantage_ptr, weight_ptr, importance_ptr, None,
                        out_ptr, low, high, delta, beta, tau_pos, tau_neg, SURROGATE, KIND, CORRECT_KL)  # fmt: skip
        h = tl.zeros((1,), tl.float32)
        if bonus_ptr is not None:
            h = -tl.load(bonus_ptr + rows)
        _write_gradient(z_ptr, z_ptr, target, scale, lse2, rest, logp, entropy, g, h, vocab, BLOCK)


@triton.jit
def _logits_grpo_bwd_kernel(z_ptr, z_stride, d_ptr, d_stride, place_ptr, target_ptr, inv_t, inv_t_ptr, stats_ptr, g_ptr,
                            h_ptr, n_rows, vocab, BLOCK: tl.constexpr):  # fmt: skip
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
def _scale_kernel(d_ptr, d_stride, factor_ptr, vocab, BLOCK: tl.constexpr):
    """A row times a number on the device, in place; 1 costs nothing, and nobody waits to learn that it is 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor == 1.0:
        return
    d_ptr += tl.program_id(0).to(tl.int64) * d_stride
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        d = tl.load(d_ptr + cols, mask=cols < vocab, other=0.0).to(tl.float32) * factor
        tl.store(d_ptr + cols, d.to(d_ptr.dtype.element_ty), mask=cols < vocab)
