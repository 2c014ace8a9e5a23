"""The kernels over tokens that stand between the matrix products: from sums to the log-prob, the entropy and E's patch.

    logp = (c - a) / T - log(S + e_t),   H = log(S + e_t) - (sum_v E (z - a)) / (S + e_t),   e_t = exp((c - a) / T)

with c the target's y, a the anchor and S the sum of E over the tokens other than the target. `_reduce_fwd_kernel` sums
over the vocabulary tiles, `_finish_fwd_kernel` computes the formulas above, and `_entropy_bwd_kernel` brings an entropy
gradient into E. Sums run in fixed order and without atomics. The kernels use pointer loads, since bulk copies combined
with reductions are slower (triton issue 9703).

Shapes: N rows of hidden states (tokens), V vocabulary. Every value per row is fp32 [N].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch
from fastgrpo.kernels.tiles import GUARD, LN2, ROWS_VARY, Head, row_scale

SHARE = 2.0**15  # the largest power of two in fp16


class Rows(NamedTuple):
    """What the forward computes for each token. Each field is one row of a [7, N] fp32 tensor.

    Attributes:
        logp: Log-prob of the target.
        entropy: Entropy of the row's distribution, in nats.
        anchor: a, in the unit of y: E = exp((y - a) / T).
        slope: What a gradient of logp is multiplied by to give v, -1 / (T sum_v E).
        patch: The entry of E at the target that the backward reads: minus the sum of E over the other tokens, times
            the slope of the soft-cap at the target.
        mass: exp((y_t - a) / T), times the slope of the soft-cap at the target.
        norm: sum_v E.
    """

    logp: torch.Tensor
    entropy: torch.Tensor
    anchor: torch.Tensor
    slope: torch.Tensor
    patch: torch.Tensor
    mass: torch.Tensor
    norm: torch.Tensor

    def normalized(self) -> "Rows":
        """Return the same with the log-sum-exp as the anchor: E is then the probability, and norm is 1."""
        t = -1 / (self.slope * self.norm)
        return Rows(self.logp, self.entropy, self.anchor + self.norm.log() * t, self.slope * self.norm,
                    self.patch / self.norm, self.mass / self.norm, torch.ones_like(self.norm))  # fmt: skip

    def shares(self) -> "Rows":
        """Return the same with an anchor that makes E the share p / (1 - p_target) of each other token, times 2^15.

        fp16 then holds the shares of a confident row as well as those of another one.
        """
        rows = self.normalized()
        unit = SHARE / (-torch.expm1(self.logp)).clamp(min=1e-30)
        t = -1 / rows.slope
        return Rows(rows.logp, rows.entropy, rows.anchor - unit.log() * t, rows.slope / unit, rows.patch * unit,
                    rows.mass * unit, unit)  # fmt: skip


@triton.jit
def log1p(x):
    """Return log(1 + x) to full relative precision, which the log-prob of a confident token needs: it is -x.

    Args:
        x: fp32 values, at least 0.
    """
    series = x * (1.0 - x * (0.5 - x * (0.33333333 - x * 0.25)))
    return tl.where(x < 0.01, series, tl.log(1.0 + x))


@triton.jit(**ROWS_VARY)
def _reduce_fwd_kernel(tiles_ptr, out_ptr, n_rows, n_tiles, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Sum [tiles, N] over the tiles into out [N], in fixed order."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, n_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        offset = tile.to(tl.int64)[:, None] * n_rows + rows[None, :]
        part = tl.load(tiles_ptr + offset, mask=(tile < n_tiles)[:, None] & (rows < n_rows)[None, :], other=0.0)
        total += tl.sum(part, axis=0)
    tl.store(out_ptr + rows, total, mask=rows < n_rows)


@triton.jit(**ROWS_VARY)
def _finish_fwd_kernel(out_ptr, target_y_ptr, total_ptr, entropy_ptr, split_max_ptr, split_total_ptr,
                       split_entropy_ptr, target_ptr, e_ptr, e_stride, inv_t, inv_t_ptr, cap, n_rows, n_splits,
                       WITH_ENTROPY: tl.constexpr, ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr):  # fmt: skip
    """Compute `Rows` from the sums of each row.

    With total_ptr, the splits of the online softmax count for flagged rows alone; without it, for all rows.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = rows < n_rows
    scale = row_scale(inv_t, inv_t_ptr, rows, n_rows)
    c = tl.load(target_y_ptr + rows, mask=ok, other=0.0)
    c2 = c * scale
    total = tl.zeros((ROWS,), dtype=tl.float32)
    entropy = tl.zeros((ROWS,), dtype=tl.float32)
    moved = ok
    if total_ptr is not None:
        total = tl.load(total_ptr + rows, mask=ok, other=0.0)
        moved = total >= GUARD
        if WITH_ENTROPY:
            entropy = tl.load(entropy_ptr + rows, mask=ok, other=0.0)
    split = tl.arange(0, BLOCK_SPLITS)
    offset = split.to(tl.int64)[:, None] * n_rows + rows[None, :]
    here = (split < n_splits)[:, None] & (moved & ok)[None, :]
    tops = tl.load(split_max_ptr + offset, mask=here, other=float("-inf"))
    parts = tl.load(split_total_ptr + offset, mask=here, other=0.0)
    top = tl.maximum(tl.max(tops, axis=0), c2)  # the target may be the largest
    base = tl.where(moved, top, c2)
    shrink = tl.exp2(tops - base[None, :])
    total = tl.where(moved, tl.sum(parts * shrink, axis=0), total)
    if WITH_ENTROPY:
        ents = tl.load(split_entropy_ptr + offset, mask=here, other=0.0)
        ents += tl.where(parts > 0, parts * (tops - base[None, :]), 0.0)
        entropy = tl.where(moved, tl.sum(ents * shrink, axis=0), entropy)
    target_e = tl.exp2(c2 - base)  # 1 where the anchor is the target
    norm = total + target_e
    log_norm = tl.where(base == c2, log1p(total), tl.log(norm))
    logp = (c2 - base) * LN2 - log_norm
    # H = log sum_v E - sum_v E (z - a) / sum_v E
    row_entropy = log_norm - (entropy + target_e * tl.maximum(c2 - base, -1e30)) * LN2 / norm
    bend = tl.full((ROWS,), 1.0, dtype=tl.float32)
    if cap is not None:
        bend = 1.0 - (c / cap) * (c / cap)
    patch = -total * bend
    tl.store(out_ptr + rows, logp, mask=ok)
    tl.store(out_ptr + n_rows + rows, row_entropy, mask=ok)
    # An anchor that has not moved is handed on bit by bit: the guarded pass rewrites the rows beside a flagged one, and
    # they must get the same E again.
    tl.store(out_ptr + 2 * n_rows + rows, tl.where(base == c2, c, base / scale), mask=ok)
    tl.store(out_ptr + 3 * n_rows + rows, -scale * LN2 / norm, mask=ok)
    tl.store(out_ptr + 4 * n_rows + rows, patch, mask=ok)
    tl.store(out_ptr + 5 * n_rows + rows, target_e * bend, mask=ok)
    tl.store(out_ptr + 6 * n_rows + rows, norm, mask=ok)
    if e_ptr is not None:
        target = tl.load(target_ptr + rows, mask=ok, other=-1)
        # c is NaN for a target outside of [0, V), and a negative target lies on another rank.
        legal = ok & (c == c) & (target >= 0)
        tl.store(e_ptr + rows.to(tl.int64) * e_stride + target, patch.to(e_ptr.dtype.element_ty), mask=legal)


@triton.jit(**ROWS_VARY)
def _entropy_bwd_kernel(e_ptr, e_stride, out_ptr, out_stride, target_ptr, patch_ptr, g_ptr, h_ptr, norm_ptr,
                        entropy_ptr, vocab, BLOCK: tl.constexpr):  # fmt: skip
    """Turn E into E (g + h (log p + H)) with log p = ln E - ln norm, and take the target's entry from patch.

    out may be E itself.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(h_ptr + row)
    constant = tl.load(g_ptr + row) + h * (tl.load(entropy_ptr + row) - tl.log(tl.load(norm_ptr + row)))
    e = tl.load(e_ptr + row * e_stride + cols, mask=cols < vocab, other=0.0).to(tl.float32)
    # Below 1.1755e-38, the least normal number of fp32, Triton would type the constant as fp64.
    x = tl.where(e == 0, 0.0, e * (constant + h * tl.log(tl.maximum(e, 1.2e-38))))
    x = tl.where(cols == tl.load(target_ptr + row), tl.load(patch_ptr + row), x)
    tl.store(out_ptr + row * out_stride + cols, x.to(out_ptr.dtype.element_ty), mask=cols < vocab)


def reduce_fwd(tiles: torch.Tensor) -> torch.Tensor:
    """Sum over the vocabulary tiles, in fixed order.

    Args:
        tiles: [vocabulary tiles, N] fp32.

    Returns:
        [N] fp32.
    """
    n_tiles, n = tiles.shape
    out = torch.empty(n, dtype=torch.float32, device=tiles.device)
    _reduce_fwd_kernel[(triton.cdiv(n, launch.REDUCE_ROWS),)](
        tiles, out, n, n_tiles, ROWS=launch.REDUCE_ROWS, TILES=launch.REDUCE_TILES
    )
    return out


def finish_fwd(
    head: Head,
    target_y: torch.Tensor,
    total: torch.Tensor | None,
    entropy: torch.Tensor | None,
    splits: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    exps: torch.Tensor | None,
    with_entropy: bool,
) -> torch.Tensor:
    """Compute what the loss and the backward need for each row.

    Args:
        head: The checked arguments of the head.
        target_y: [N] fp32, y at the target.
        total: [N] fp32, the sum of E over the tokens other than the target, with the target as the anchor; None where
            the splits alone are known.
        entropy: [N] fp32, the sum of E x2 over the same tokens, or None.
        splits: Maxima, sums and entropy sums of the online softmax (`online_fwd`), which count for flagged rows, or for
            all where `total` is None.
        exps: [N, V] E, whose entries at the targets are patched, or None.
        with_entropy: Whether the entropy is computed.

    Returns:
        [7, N] fp32, see `Rows`.
    """
    n = len(target_y)
    out = torch.empty(7, n, dtype=torch.float32, device=target_y.device)
    _finish_fwd_kernel[(triton.cdiv(n, launch.REDUCE_ROWS),)](
        out, target_y, total, entropy, *splits, head.targets, exps, 0 if exps is None else exps.stride(0),
        head.temperature, head.temperatures, head.softcap, n, len(splits[0]), WITH_ENTROPY=with_entropy,
        ROWS=launch.REDUCE_ROWS, BLOCK_SPLITS=launch.MAX_SPLITS if total is None else launch.GUARD_SPLITS,
    )  # fmt: skip
    return out


def entropy_bwd(
    exps: torch.Tensor, targets: torch.Tensor, rows: Rows, g: torch.Tensor, h: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Bring the gradients of log-prob and entropy into anchored exponentials; v is then `rows.slope` alone.

        out_v = E_v (g + h (log p_v + H)),   v != target

    Args:
        exps: [N, V] E.
        targets: [N] int64.
        rows: What the forward computed.
        g: [N] fp32, gradient of the log-probs.
        h: [N] fp32, gradient of the entropies.
        out: [N, V], which is written: `exps` itself or another tensor.
    """
    patch = g * rows.patch + h * rows.mass * (rows.logp + rows.entropy)
    block = 64 if launch.INTERPRET else 4096
    _entropy_bwd_kernel[(len(exps), triton.cdiv(exps.shape[1], block))](
        exps, exps.stride(0), out, out.stride(0), targets, patch, g, h, rows.norm, rows.entropy, exps.shape[1],
        BLOCK=block,
    )  # fmt: skip
    return out
