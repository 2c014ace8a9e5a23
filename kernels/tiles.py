"""What the matrix kernels share: the product of two sets of rows, the pieces of an epilogue, the head's arguments."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# A row whose others sum to this much (59.6 nats above its target) gets its maximum as the anchor: V e^80 overflows the
# fp32 sum, and v H underflows in bf16 past 65 nats.
GUARD = tl.constexpr(2.0**86)
# What changes from batch to batch must not ask for another compilation: how many rows there are, and where among its
# neighbours a vector over rows begins.
ROWS_VARY = {
    "do_not_specialize": ("n_rows", "n_splits", "SPLITS"),
    "do_not_specialize_on_alignment": (
        "advantage_ptr", "anchor_ptr", "bonus_ptr", "entropy_ptr", "flag_ptr", "g_ptr", "importance_ptr", "inv_t_ptr",
        "log_ratio_ptr", "logp_ptr", "mix_ptr", "norm_ptr", "old_ptr", "patch_ptr", "phi_ptr", "place_ptr", "ref_ptr",
        "target_ptr", "target_y_ptr", "total_ptr", "weight_ptr",
    ),
}  # fmt: skip


@triton.jit
def flagged(total_ptr, rows, n_rows):
    """Which of the rows need another anchor; NaN is not among them and stays NaN."""
    return tl.load(total_ptr + rows, mask=rows < n_rows, other=0.0) >= GUARD


@triton.jit
def row_scale(inv_t, inv_t_ptr, rows, n_rows):
    """log2(e) / T of each row: T a float, or [N] where the pointer is given."""
    if inv_t_ptr is not None:
        return tl.load(inv_t_ptr + rows, mask=rows < n_rows, other=1.0) * LOG2E
    return tl.zeros_like(rows).to(tl.float32) + inv_t * LOG2E


@triton.jit
def tanh(x):
    """By exp: absolute error of an fp32 rounding; one division."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def dot_rows(h_ptr, h_stride, rows, w_ptr, w_stride, cols, depth, precision: tl.constexpr, even_k: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] = hidden[rows] @ weight[cols].T in fp32; the caller keeps both indices in range."""
    k = tl.arange(0, BLOCK_K)
    h_ptrs = h_ptr + rows.to(tl.int64)[:, None] * h_stride + k[None, :]
    w_ptrs = w_ptr + cols.to(tl.int64)[None, :] * w_stride + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        if even_k:
            h = tl.load(h_ptrs)
            w = tl.load(w_ptrs)
        else:
            h = tl.load(h_ptrs, mask=(start + k < depth)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=(start + k < depth)[:, None], other=0.0)
        acc = tl.dot(h, w, acc, input_precision=precision)
        h_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    return acc


class Head(NamedTuple):
    """What every launch reads: hidden [N, D], weight [V, D], bias [V] or None, targets [N], T a float or fp32 [N]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    temperature: float
    temperatures: torch.Tensor | None
    softcap: float | None

    def checked(self):
        """Rows contiguous, 1 / T ready, every shape as written above."""
        n, (vocab, depth) = len(self.hidden), self.weight.shape
        assert self.hidden.shape == (n, depth) and self.targets.shape == (n,), (self.hidden.shape, self.targets.shape)
        assert self.hidden.dtype == self.weight.dtype, (self.hidden.dtype, self.weight.dtype)
        inverse = None if self.temperatures is None else self.temperatures.float().reciprocal()
        assert inverse is None or inverse.shape == (n,), inverse.shape
        bias = None if self.bias is None else self.bias.contiguous()
        assert bias is None or bias.shape == (vocab,), bias.shape
        return Head(launch.rows_contiguous(self.hidden), launch.rows_contiguous(self.weight), bias,
                    self.targets.contiguous(), 1.0 / self.temperature, inverse, self.softcap)  # fmt: skip

    def cut(self, part):
        """The rows of a slice."""
        temperatures = None if self.temperatures is None else self.temperatures[part]
        return self._replace(hidden=self.hidden[part], targets=self.targets[part], temperatures=temperatures)


def blocks_of(table):
    """The table's block sizes, or the interpreter's small ones."""
    return launch.INTERPRETED if launch.INTERPRET else table


def product_options(head, blocks):
    """Options shared by the pointer kernels."""
    n, depth = head.hidden.shape
    return {
        "n_rows": n,
        "vocab": head.weight.shape[0],
        "depth": depth,
        "PRECISION": launch.precision(head.hidden.dtype),
        "EVEN_K": depth % blocks.depth == 0,
        "BLOCK_M": blocks.rows,
        "BLOCK_K": blocks.depth,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }
