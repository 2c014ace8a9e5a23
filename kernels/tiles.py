"""What the matrix kernels share: the product of two sets of rows, parts of an epilogue, and the arguments of a head.

Shapes: N rows of hidden states (tokens), V vocabulary, D hidden size; hidden [N, D], weight [V, D].
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# A row of logits is flagged when the exponentials of its other tokens, relative to its target, sum to this much (59.6
# nats). It then gets its maximum as the anchor: V e^80 overflows the fp32 sum, and v H underflows in bf16 past 65 nats.
GUARD = tl.constexpr(2.0**86)
# What changes from batch to batch must not ask for another compilation: the number of tokens, and the alignment of a
# vector over tokens, which may be a slice of a longer one.
ROWS_VARY = {
    "do_not_specialize": ("n_rows", "n_splits", "SPLITS", "count"),
    "do_not_specialize_on_alignment": (
        "advantage_ptr", "anchor_ptr", "bonus_ptr", "entropy_ptr", "flag_ptr", "g_ptr", "importance_ptr", "inv_t_ptr",
        "log_ratio_ptr", "logp_ptr", "mix_ptr", "norm_ptr", "old_ptr", "patch_ptr", "phi_ptr", "place_ptr", "ref_ptr",
        "target_ptr", "target_y_ptr", "total_ptr", "weight_ptr",
    ),
}  # fmt: skip


@triton.jit
def flagged(total_ptr, rows, n_rows):
    """Return which rows need another anchor than their target. NaN does not, and stays NaN.

    Args:
        total_ptr: [N] sums of the exponentials of the tokens other than the target.
        rows: Numbers of the rows.
        n_rows: N.
    """
    return tl.load(total_ptr + rows, mask=rows < n_rows, other=0.0) >= GUARD


@triton.jit
def row_scale(inv_t, inv_t_ptr, rows, n_rows):
    """Return log2(e) / T of each row.

    Args:
        inv_t: 1 / T of all rows, read where `inv_t_ptr` is None.
        inv_t_ptr: [N] 1 / T of each row, or None.
        rows: Numbers of the rows.
        n_rows: N.
    """
    if inv_t_ptr is not None:
        return tl.load(inv_t_ptr + rows, mask=rows < n_rows, other=1.0) * LOG2E
    return tl.zeros_like(rows).to(tl.float32) + inv_t * LOG2E


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, by one exponential and one division, to an absolute error of fp32 rounding.

    Args:
        x: fp32 values.
    """
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def dot_rows(h_ptr, h_stride, rows, w_ptr, w_stride, cols, depth, precision: tl.constexpr, even_k: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Return hidden[rows] @ weight[cols].T, [BLOCK_M, BLOCK_N] fp32.

    Args:
        h_ptr: hidden [N, D].
        h_stride: Elements between two rows of hidden.
        rows: [BLOCK_M] row numbers in [0, N).
        w_ptr: weight [V, D].
        w_stride: Elements between two rows of weight.
        cols: [BLOCK_N] vocabulary entries in [0, V).
        depth: D.
        precision: Input precision of the product, "ieee" or "tf32".
        even_k: Whether D is a multiple of BLOCK_K, so that no load needs a mask.
        BLOCK_M: Rows of the block.
        BLOCK_N: Vocabulary entries of the block.
        BLOCK_K: Elements of D that one step reads.
    """
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
    """What every launch of a head's kernel reads.

    Attributes:
        hidden: [N, D] bf16, fp16 or fp32.
        weight: [V, D] in the dtype of hidden.
        bias: [V] or None.
        targets: [N] int64, ids of the vocabulary.
        temperature: T of all rows, read where `temperatures` is None; 1 / T once checked.
        temperatures: [N] T of each row, or None; 1 / T in fp32 once checked.
        softcap: Cap of the logits, cap tanh(z / cap), or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    temperature: float
    temperatures: torch.Tensor | None
    softcap: float | None

    def checked(self) -> "Head":
        """Check every shape and return the head with contiguous rows, and with 1 / T in place of T."""
        n, (vocab, depth) = len(self.hidden), self.weight.shape
        assert self.hidden.shape == (n, depth) and self.targets.shape == (n,), (self.hidden.shape, self.targets.shape)
        assert self.hidden.dtype == self.weight.dtype, (self.hidden.dtype, self.weight.dtype)
        inverse = None if self.temperatures is None else self.temperatures.float().reciprocal()
        assert inverse is None or inverse.shape == (n,), inverse.shape
        bias = None if self.bias is None else self.bias.contiguous()
        assert bias is None or bias.shape == (vocab,), bias.shape
        return Head(launch.rows_contiguous(self.hidden), launch.rows_contiguous(self.weight), bias,
                    self.targets.contiguous(), 1.0 / self.temperature, inverse, self.softcap)  # fmt: skip

    def cut(self, part: slice) -> "Head":
        """Return the head of some rows of hidden."""
        temperatures = None if self.temperatures is None else self.temperatures[part]
        return self._replace(hidden=self.hidden[part], targets=self.targets[part], temperatures=temperatures)


def blocks_of(table: launch.Blocks) -> launch.Blocks:
    """Return the block sizes of a launch: the given ones, or small ones under the interpreter."""
    return launch.INTERPRETED if launch.INTERPRET else table


def product_options(head: Head, blocks: launch.Blocks) -> dict[str, Any]:
    """Return the keyword arguments that all kernels with pointer loads take."""
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
