"""The kernels over rows that stand between the matrix products: sums of tiles -> log-prob, entropy, what E needs.

    logp = (c - a) / T - log(S + e_t),   H = log(S + e_t) - (sum_v E (z - a)) / (S + e_t),   e_t = exp((c - a) / T)

with c the target's y, a the anchor, S the sum of E over the others. Sums run in fixed order and without atomics. Row
kernels use pointer loads: bulk copies combined with reductions are slower (triton issue 9703).

Shapes: N rows, V vocabulary. Everything per row is fp32 [N].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch
from fastgrpo.kernels.tiles import GUARD, LN2, ROWS_VARY, row_scale


class Rows(NamedTuple):
    """Per-row results of the forward, the rows of one [7, N] fp32 tensor.

    logp, entropy. anchor: a in y's unit, E = exp((y - a) / T). slope: what g is multiplied by, -1 / (T sum_v E).
    patch: the target's entry of E, -sum over v != t of E (times the soft-cap's slope at the target). mass: exp((y_t -
    a) / T), times the same. norm: sum_v E.
    """

    logp: torch.Tensor
    entropy: torch.Tensor
    anchor: torch.Tensor
    slope: torch.Tensor
    patch: torch.Tensor
    mass: torch.Tensor
    norm: torch.Tensor

    def normalized(self):
        """The same with the log-sum-exp as the anchor: E is then the probability, and norm 1."""
        t = -1 / (self.slope * self.norm)
        return Rows(self.logp, self.entropy, self.anchor + self.norm.log() * t, self.slope * self.norm,
                    self.patch / self.norm, self.mass / self.norm, torch.ones_like(self.norm))  # fmt: skip


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0 to full relative precision: a confident token's log-prob is -x."""
    series = x * (1.0 - x * (0.5 - x * (0.33333333 - x * 0.25)))
    return tl.where(x < 0.01, series, tl.log(1.0 + x))


@triton.jit(**ROWS_VARY)
def _reduce_fwd_kernel(tiles_ptr, out_ptr, n_rows, n_tiles, ROWS: tl.constexpr, TILES: tl.constexpr):
    """out [N] = sum over the tiles of [tiles, N], in fixed order."""
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
    """Sums of a row -> `Rows`. With total_ptr the splits count for flagged rows alone; without, for all."""
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
    # An unmoved anchor is handed on bit by bit: the guarded pass rewrites unflagged neighbours with the same E.
    tl.store(out_ptr + 2 * n_rows + rows, tl.where(base == c2, c, base / scale), mask=ok)
    tl.store(out_ptr + 3 * n_rows + rows, -scale * LN2 / norm, mask=ok)
    tl.store(out_ptr + 4 * n_rows + rows, patch, mask=ok)
    tl.store(out_ptr + 5 * n_rows + rows, target_e * bend, mask=ok)
    tl.store(out_ptr + 6 * n_rows + rows, norm, mask=ok)
    if e_ptr is not None:
        target = tl.load(target_ptr + rows, mask=ok, other=-1)
        legal = ok & (c == c) & (target >= 0)  # NaN: a target outside [0, V); negative: another rank has it
        tl.store(e_ptr + rows.to(tl.int64) * e_stride + target, patch.to(e_ptr.dtype.element_ty), mask=legal)


@triton.jit(**ROWS_VARY)
def _entropy_bwd_kernel(e_ptr, e_stride, out_ptr, out_stride, target_ptr, patch_ptr, g_ptr, h_ptr, norm_ptr,
                        entropy_ptr, vocab, BLOCK: tl.constexpr):  # fmt: skip
    """E -> E (g + h (log p + H)), log p = ln E - ln norm; the target's entry from patch. out may be E itself."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(h_ptr + row)
    constant = tl.load(g_ptr + row) + h * (tl.load(entropy_ptr + row) - tl.log(tl.load(norm_ptr + row)))
    e = tl.load(e_ptr + row * e_stride + cols, mask=cols < vocab, other=0.0).to(tl.float32)
    x = tl.where(e == 0, 0.0, e * (constant + h * tl.log(tl.maximum(e, 1e-38))))
    x = tl.where(cols == tl.load(target_ptr + row), tl.load(patch_ptr + row), x)
    tl.store(out_ptr + row * out_stride + cols, x.to(out_ptr.dtype.element_ty), mask=cols < vocab)


def reduce_fwd(tiles):
    """[tiles, N] -> [N]."""
    n_tiles, n = tiles.shape
    out = torch.empty(n, dtype=torch.float32, device=tiles.device)
    _reduce_fwd_kernel[(triton.cdiv(n, launch.REDUCE_ROWS),)](
        tiles, out, n, n_tiles, ROWS=launch.REDUCE_ROWS, TILES=launch.REDUCE_TILES
    )
    return out


def finish_fwd(head, target_y, total, entropy, splits, exps, with_entropy):
    """-> [7, N], see `Rows`; `exps`, where given, gets its targets' entries."""
    n = len(target_y)
    out = torch.empty(7, n, dtype=torch.float32, device=target_y.device)
    _finish_fwd_kernel[(triton.cdiv(n, launch.REDUCE_ROWS),)](
        out, target_y, total, entropy, *splits, head.targets, exps, 0 if exps is None else exps.stride(0),
        head.temperature, head.temperatures, head.softcap, n, len(splits[0]), WITH_ENTROPY=with_entropy,
        ROWS=launch.REDUCE_ROWS, BLOCK_SPLITS=launch.MAX_SPLITS if total is None else launch.GUARD_SPLITS,
    )  # fmt: skip
    return out


def entropy_bwd(exps, targets, rows, g, h, out):
    """Anchored E [N, V] -> the operand with g and h in it, into `out` (E itself, or another); v is then `slope`."""
    patch = g * rows.patch + h * rows.mass * (rows.logp + rows.entropy)
    block = 64 if launch.INTERPRET else 4096
    _entropy_bwd_kernel[(len(exps), triton.cdiv(exps.shape[1], block))](
        exps, exps.stride(0), out, out.stride(0), targets, patch, g, h, rows.norm, rows.entropy, exps.shape[1],
        BLOCK=block,
    )  # fmt: skip
    return out
