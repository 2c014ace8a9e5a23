"""The language-model head in Triton: log-probs, entropy and the GRPO loss of hidden states, without logits in memory.

    y = softcap(h . w + b),   z = y / T,   softcap(x) = cap tanh(x / cap)
    logp = z_t - log sum_v exp(z_v),   H = -sum_v p_v log p_v
    dz_v = g (1[v = t] - p_v) - h p_v (log p_v + H)       for gradients g of logp and h of H

1. Anchor: c_n = y at the target, the diagonal of a product with the same rounding as the main one.
2. Exponentials: E_v = exp((y_v - c) / T), stored in bf16, which has enough exponent range. Their sums over each
   vocabulary tile are fp32. For a gradient of the entropy, x2 = log2 E is stored instead (`packed`).
3. Reduce: S, the sum of E_v over v != t, in fixed order. Then logp = -log1p(S) and p_v = E_v / (S + 1).
4. Guard: a row whose S reaches 2^86 (its target is 60 nats below the other tokens) is flagged, and its maximum becomes
   the anchor. This takes two passes, which return immediately if no row is flagged.
5. Finish: compute `RowStats`, and set the target's entry of E to -S. Then dz_v = v E_v for v = -g / (S + 1): the
   product of the forward is the operand of the backward.
6. Gradients, by cuBLAS: dH = v (E W), dW = E^T (v H), dbias = E^T v. With the forward, three products.

A GRPO gradient is separable by token: g follows from logp. The loss has one of three forms:

- One chunk (M <= chunk_rows): E is kept, and both products of the gradient run in the backward. Nothing is wasted under
  no_grad or in a checkpointed region, and dW has the weight's dtype.
- Several chunks: the forward computes the gradients of each chunk and sums dW in fp32. A sequence-level factor needs
  all log-probs of its sequence. So chunks then end where sequences end, and a sequence longer than a chunk costs a
  forward-only pass over all tokens.
- An entropy bonus under a soft-cap: g and h are kept, and the backward recomputes E: four products. Log-probs of
  several chunks use this form too.

A weight may be sharded by rows over processes (`group` is the name of their process group). Then c, the sums and the
maxima of flagged rows [N] are all-reduced, so that all ranks flag the same rows. Only the rank with the target patches
its E. dH is summed over the ranks. Targets are then ids within the shard, or ELSEWHERE (head_torch.py).

The kernels support bf16. In the interpreter they also support fp32, so that tests can distinguish errors from rounding.
All arithmetic after the products is fp32. Exponents are in base 2, x2 = x log2(e) / T. Row kernels use pointer loads,
because bulk copies combined with reductions are slower (triton issue 9703). The operators are opaque to torch.compile,
which would split their products.

Shapes: N rows of hidden states (tokens), M <= N kept ones, n rows of a chunk, V vocabulary, D hidden size, S sequences.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fastgrpo.kernels import launch
from fastgrpo.kernels.head_torch import (
    ELSEWHERE,
    add_weight_product_,
    all_reduce_,
    bias_product,
    hidden_product,
)
from fastgrpo.kernels.launch import LN2, LOG2E, ROWS_VARY, log1p
from fastgrpo.kernels.logits import policy_loss_fwd
from fastgrpo.kernels.objectives import PolicyRows, cut, first_order, needed, no_autocast, policy_parts

Tensor = torch.Tensor


# A row is flagged if its other tokens have a sum S of exponentials relative to the target of this (e^59.6) or more. Its
# anchor is then its maximum: V terms of e^80 overflow the fp32 sum, and v H underflows in bf16 for S above e^65.
GUARD = tl.constexpr(2.0**86)


@triton.jit
def flagged(total_ptr, rows, n_rows):
    """Return which rows need another anchor than their target. NaN is not flagged, and stays NaN.

    `total_ptr` [N] holds the sum of E over all tokens except the target.
    """
    return tl.load(total_ptr + rows, mask=rows < n_rows, other=0.0) >= GUARD


@triton.jit
def packed(x2):
    """Round x2 = log2 E to 16 bits: steps of 1/512 from -41, below which a token has no effect, to 87, above the guard.

    An entropy gradient h computes E (g + h (log p + H)) from the stored value, and rounds it for the products. If E has
    a relative error r, the result has the error r E (g + h (log p + H + 1)), far more than its own rounding where log p
    and H nearly cancel. r is at most 2^-8 for E in bf16, which spends 9 of 16 bits on sign and exponent, and at most
    ln(2) / 1024 here.
    """
    # For a sum in [2^14, 2^14 + 128), the low 16 bits of the fp32 number are its excess over 2^14 in steps of 1/512.
    return (tl.maximum(x2, -41.0) + 16425.0).to(tl.int32, bitcast=True) & 0xFFFF


@triton.jit
def row_scale(inv_t, inv_t_ptr, rows, n_rows):
    """Return log2(e) / T of each row. `inv_t` (of all rows) and `inv_t_ptr` ([N], or None) hold 1 / T."""
    if inv_t_ptr is not None:
        return tl.load(inv_t_ptr + rows, mask=rows < n_rows, other=1.0) * LOG2E
    return tl.zeros_like(rows).to(tl.float32) + inv_t * LOG2E


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent by one exponential and one division. Its absolute error is fp32 rounding."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def dot_rows(h_ptr, h_stride, rows, w_ptr, w_stride, cols, depth, even_k: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Return hidden[rows] @ weight[cols].T, [BLOCK_M, BLOCK_N] fp32.

    Indices must be within [0, N) and [0, V). `even_k` says that D is a multiple of BLOCK_K, so that loads need no mask.
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
        acc = tl.dot(h, w, acc)
        h_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    return acc


class Head(NamedTuple):
    """Common inputs of all launches of the head's kernels."""

    hidden: torch.Tensor  # [N, D] bf16
    weight: torch.Tensor  # [V, D] in the dtype of hidden
    bias: torch.Tensor | None  # [V]
    targets: torch.Tensor  # [N] int64, ids of the vocabulary
    temperature: float  # T of all rows, used if `temperatures` is None; 1 / T after `checked`
    temperatures: torch.Tensor | None  # [N] T of each row; 1 / T in fp32 after `checked`
    softcap: float | None  # cap of the logits, cap tanh(z / cap)

    def checked(self) -> "Head":
        """Check all shapes, and return the head with contiguous rows, and with 1 / T instead of T."""
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
        """Return the head for some rows of hidden."""
        temperatures = None if self.temperatures is None else self.temperatures[part]
        return self._replace(hidden=self.hidden[part], targets=self.targets[part], temperatures=temperatures)


def blocks_of(table: launch.Blocks) -> launch.Blocks:
    """Return the given block sizes, or small ones under the interpreter."""
    return launch.INTERPRETED if launch.INTERPRET else table


def product_options(head: Head, blocks: launch.Blocks) -> dict[str, Any]:
    """Return the common keyword arguments of all kernels with pointer loads."""
    n, depth = head.hidden.shape
    return {
        "n_rows": n,
        "vocab": head.weight.shape[0],
        "depth": depth,
        "EVEN_K": depth % blocks.depth == 0,
        "BLOCK_M": blocks.rows,
        "BLOCK_K": blocks.depth,
        **launch.options(blocks.warps, blocks.stages),
    }


# Adjacent row blocks. One wave of programs then computes about 16 x 128 rows by 8 x 256 columns, which reads the fewest
# bytes of both operands.
GROUP_M = 16
# On a GPU, the rows of E are rounded up to a multiple of this. M changes between steps, and torch's allocator can reuse
# memory only for equal sizes. A chunk of 8,192 rows has 8 sizes.
ROWS_HELD = 1024


@triton.jit
def _grouped(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Return (row block, vocabulary tile) of a tile, GROUP_M row blocks at a time, so that a wave shares operands."""
    width = GROUP_M * num_n
    first_m = tile // width * GROUP_M
    group = tl.minimum(num_m - first_m, GROUP_M)
    return first_m + tile % width % group, tile % width // group


@triton.jit
def _exp_epilogue(acc, rows, block_n, n_rows, vocab, anchor_ptr, target_ptr, patch_ptr, mix_ptr, bias_ptr, inv_t,
                  inv_t_ptr, cap, SUM: tl.constexpr, ENTROPY: tl.constexpr, LOGS: tl.constexpr,
                  BLOCK_N: tl.constexpr):  # fmt: skip
    """Compute (E, or x2 with LOGS; sum_v E; sum_v E x2) of a tile of products. The sums exclude the target's column."""
    first = block_n * BLOCK_N
    row_ok = rows < n_rows
    y = acc
    if bias_ptr is not None:
        cols = first + tl.arange(0, BLOCK_N)  # recomputed below, to save registers
        y += tl.load(bias_ptr + cols, mask=cols < vocab, other=0.0).to(tl.float32)[None, :]
    if cap is not None:
        bent = tanh(y * (1.0 / cap))
        y = bent * cap
    scale = row_scale(inv_t, inv_t_ptr, rows, n_rows)
    anchor = tl.load(anchor_ptr + rows, mask=row_ok, other=0.0)
    # One multiply-add per element. The product of anchor and scale is rounded, which shifts x2 of a row by half a unit
    # in the last place of the anchor, as rounding the logit to fp32 does.
    x2 = tl.fma(y, tl.broadcast_to(scale[:, None], y.shape), tl.broadcast_to((-anchor * scale)[:, None], y.shape))
    target = tl.load(target_ptr + rows, mask=row_ok, other=-1).to(tl.int32)
    # Columns past V are zeros filled in by the load, and must not count as logits of 0. There is only one code path for
    # the sums here, because two would exceed the registers. With a mix there are no sums.
    if (bias_ptr is not None or ENTROPY) and mix_ptr is None:
        cols = first + tl.arange(0, BLOCK_N)
        x2 = tl.where((cols < vocab)[None, :] & (cols[None, :] != target[:, None]), x2, float("-inf"))
    e = tl.exp2(x2)
    stored = e
    if LOGS:
        stored = x2
    if mix_ptr is not None:
        constant = tl.load(mix_ptr + rows, mask=row_ok, other=0.0)
        slope = tl.load(mix_ptr + n_rows + rows, mask=row_ok, other=0.0)
        stored = e * (constant[:, None] + slope[:, None] * tl.maximum(x2, -1e30))
    if cap is not None:
        stored *= 1.0 - bent * bent  # the cap's slope: dy/dx = 1 - tanh^2
    total = tl.zeros_like(anchor)
    entropy = tl.zeros_like(anchor)
    if bias_ptr is not None or ENTROPY:
        if patch_ptr is not None:
            cols = first + tl.arange(0, BLOCK_N)
            patch = tl.load(patch_ptr + rows, mask=row_ok, other=0.0)
            stored = tl.where(cols[None, :] == target[:, None], patch[:, None], stored)
        if SUM:
            total = tl.sum(e, axis=1)
        if ENTROPY:
            # finite, since 0 * -inf would be NaN; with LOGS the value that is stored
            entropy = tl.sum(e * tl.maximum(x2, -41.0 if LOGS else -1e30), axis=1)
    else:
        # Few tiles contain a target or end past V. The others need no masks.
        ends = first + BLOCK_N
        if (tl.max(((target >= first) & (target < ends)).to(tl.int32)) == 0) & (ends <= vocab):
            total = tl.sum(e, axis=1)
        else:
            cols = first + tl.arange(0, BLOCK_N)
            is_target = cols[None, :] == target[:, None]
            if patch_ptr is not None:
                stored = tl.where(is_target, tl.load(patch_ptr + rows, mask=row_ok, other=0.0)[:, None], stored)
            if SUM:
                total = tl.sum(tl.where((cols < vocab)[None, :] & (is_target == 0), e, 0.0), axis=1)
    return stored, total, entropy


@triton.jit(**ROWS_VARY)
def _linear_exp_fwd_kernel(h_desc, w_desc, e_desc, anchor_ptr, target_ptr, patch_ptr, mix_ptr, bias_ptr, inv_t,
                           inv_t_ptr, cap, total_ptr, entropy_ptr, n_rows, vocab, depth, PROGRAMS: tl.constexpr,
                           GROUP_M: tl.constexpr, FLATTEN: tl.constexpr, LOGS: tl.constexpr, BLOCK_M: tl.constexpr,
                           BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Compute every PROGRAMS-th tile, with loads and stores by tensor descriptors."""
    num_m = tl.cdiv(n_rows, BLOCK_M)
    num_n = tl.cdiv(vocab, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        block_m, block_n = _grouped(tile, num_m, num_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, depth, BLOCK_K):
            h = h_desc.load([block_m * BLOCK_M, start])
            w = w_desc.load([block_n * BLOCK_N, start])
            acc = tl.dot(h, w.T, acc)
        rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        e, total, entropy = _exp_epilogue(acc, rows, block_n, n_rows, vocab, anchor_ptr, target_ptr, patch_ptr, mix_ptr,
                                          bias_ptr, inv_t, inv_t_ptr, cap, total_ptr is not None,
                                          entropy_ptr is not None, LOGS, BLOCK_N)  # fmt: skip
        if e_desc is not None:
            if e_desc.dtype == tl.int16:
                e = packed(e)
            e_desc.store([block_m * BLOCK_M, block_n * BLOCK_N], e.to(e_desc.dtype))
        _store_sums(total_ptr, entropy_ptr, total, entropy, block_n, rows, n_rows)


@triton.jit
def _store_sums(total_ptr, entropy_ptr, total, entropy, block_n, rows, n_rows):
    """Store the requested row sums of one vocabulary tile."""
    if total_ptr is not None:
        tl.store(total_ptr + block_n.to(tl.int64) * n_rows + rows, total, mask=rows < n_rows)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + block_n.to(tl.int64) * n_rows + rows, entropy, mask=rows < n_rows)


@triton.jit
def _exp_tile(h_ptr, h_stride, w_ptr, w_stride, e_ptr, e_stride, anchor_ptr, target_ptr, patch_ptr, mix_ptr, bias_ptr,
              inv_t, inv_t_ptr, cap, total_ptr, entropy_ptr, n_rows, vocab, depth, rows, block_n,
              LOGS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Compute and store one tile of the kernel with pointer loads."""
    cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = dot_rows(h_ptr, h_stride, tl.minimum(rows, n_rows - 1), w_ptr, w_stride, tl.minimum(cols, vocab - 1),
                   depth, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
    e, total, entropy = _exp_epilogue(acc, rows, block_n, n_rows, vocab, anchor_ptr, target_ptr, patch_ptr, mix_ptr,
                                      bias_ptr, inv_t, inv_t_ptr, cap, total_ptr is not None,
                                      entropy_ptr is not None, LOGS, BLOCK_N)  # fmt: skip
    if e_ptr is not None:
        if e_ptr.dtype.element_ty == tl.int16:
            e = packed(e)
        e_ptrs = e_ptr + rows.to(tl.int64)[:, None] * e_stride + cols[None, :]
        tl.store(e_ptrs, e.to(e_ptr.dtype.element_ty), mask=(rows < n_rows)[:, None] & (cols < vocab)[None, :])
    _store_sums(total_ptr, entropy_ptr, total, entropy, block_n, rows, n_rows)


@triton.jit(**ROWS_VARY)
def _linear_exp_ptr_fwd_kernel(h_ptr, h_stride, w_ptr, w_stride, e_ptr, e_stride, anchor_ptr, target_ptr, patch_ptr,
                               mix_ptr, bias_ptr, inv_t, inv_t_ptr, cap, total_ptr, entropy_ptr, flag_ptr, n_rows,
                               vocab, depth, SPLITS, LOOP: tl.constexpr, GROUP_M: tl.constexpr,
                               LOGS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
                               BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Compute one tile, or with LOOP every SPLITS-th tile of a row block; skip row blocks without a flagged row."""
    block_m, split = _grouped(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), SPLITS, GROUP_M)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if flag_ptr is not None:  # noqa: SIM102 - known at compile time, unlike the inner one
        if tl.max(flagged(flag_ptr, rows, n_rows).to(tl.int32)) == 0:
            return
    if LOOP:
        for block_n in range(split, tl.cdiv(vocab, BLOCK_N), SPLITS):
            _exp_tile(h_ptr, h_stride, w_ptr, w_stride, e_ptr, e_stride, anchor_ptr, target_ptr, patch_ptr, mix_ptr,
                      bias_ptr, inv_t, inv_t_ptr, cap, total_ptr, entropy_ptr, n_rows, vocab, depth, rows, block_n,
                      LOGS, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
    else:  # the loop needs 40 registers, and would spill at 256 columns
        _exp_tile(h_ptr, h_stride, w_ptr, w_stride, e_ptr, e_stride, anchor_ptr, target_ptr, patch_ptr, mix_ptr,
                  bias_ptr, inv_t, inv_t_ptr, cap, total_ptr, entropy_ptr, n_rows, vocab, depth, rows, split,
                  LOGS, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip


@triton.jit(**ROWS_VARY)
def _anchor_fwd_kernel(h_ptr, h_stride, w_ptr, w_stride, target_ptr, bias_ptr, cap, out_ptr, n_rows, vocab, depth,
                       EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_K: tl.constexpr):  # fmt: skip
    """Compute y at the targets of one row block, as the diagonal of a product."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    target = tl.load(target_ptr + rows, mask=rows < n_rows, other=0)
    legal = (target >= 0) & (target < vocab)
    target = tl.where(legal, target, 0).to(tl.int32)
    acc = dot_rows(h_ptr, h_stride, tl.minimum(rows, n_rows - 1), w_ptr, w_stride, target, depth, EVEN_K,
                    BLOCK_M, BLOCK_M, BLOCK_K)  # fmt: skip
    # The diagonal of this product has the same rounding as the main product. A gather and a dot product would not: its
    # one-sided error of 1e-4 would enter every log-prob.
    i = tl.arange(0, BLOCK_M)
    y = tl.sum(tl.where(i[:, None] == i[None, :], acc, 0.0), axis=1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + target).to(tl.float32)
    if cap is not None:
        y = tanh(y * (1.0 / cap)) * cap
    tl.store(out_ptr + rows, tl.where(legal, y, float("nan")), mask=rows < n_rows)


def empty_exps(rows: int, vocab: int, like: torch.Tensor, logs: bool = False) -> torch.Tensor:
    """Return an uninitialized [rows, vocab] with a pitch of a multiple of 64 elements; bulk copies need 16 bytes.

    It has the dtype of `like`, or int16 for `logs` of 16-bit heads.
    """
    held = rows if like.device.type == "cpu" else -(-rows // ROWS_HELD) * ROWS_HELD
    dtype = torch.int16 if logs and like.itemsize == 2 else like.dtype
    return torch.empty(held, -(-vocab // 64) * 64, dtype=dtype, device=like.device)[:rows, :vocab]


def anchor_fwd(head: Head) -> torch.Tensor:
    """Compute the anchor, y at the target of each row: [N] fp32, NaN for a target outside [0, V)."""
    n = len(head.hidden)
    out = torch.empty(n, dtype=torch.float32, device=head.hidden.device)
    blocks = blocks_of(launch.ANCHOR_BLOCKS)
    _anchor_fwd_kernel[(triton.cdiv(n, blocks.rows),)](
        head.hidden, head.hidden.stride(0), head.weight, head.weight.stride(0), head.targets, head.bias, head.softcap,
        out, **product_options(head, blocks),
    )  # fmt: skip
    return out


def flattens(major: int, has_softcap: bool, has_bias: bool) -> bool:
    """Return whether the persistent kernel flattens the loops over its tiles and their depth into one.

    The loads of the next tile then overlap the epilogue of this one. This would spill with a bias on sm_90, and with a
    soft-cap on sm_100.
    """
    return not (has_softcap if major == 10 else has_bias)


def linear_exp_fwd(
    head: Head,
    anchor: torch.Tensor,
    exps: torch.Tensor | None = None,
    patch: torch.Tensor | None = None,
    mix: torch.Tensor | None = None,
    sums: bool = True,
    entropy: bool = False,
    flags: torch.Tensor | None = None,
    logs: bool = False,
) -> list[torch.Tensor | None]:
    """Write E of the module docstring to `exps`, or log2 E with `logs`, and return its sums over each vocabulary tile.

    The sums of E and of E x2 (`entropy`) omit the target's column; each is [vocabulary tiles, N] fp32, or None. `patch`
    [N] replaces E at the target. `mix` [2, N] multiplies E by mix[0] + mix[1] x2, which adds an entropy gradient. With
    `flags`, [N] row sums, only row blocks with a flagged row are computed. `exps` has contiguous rows of any pitch.
    """
    n, vocab = len(head.hidden), head.weight.shape[0]
    major, minor = launch.capability(head.hidden.device)
    plain = head.softcap is None and not entropy and head.hidden.shape[1] % 64 == 0 and flags is None and mix is None
    by_descriptor = flags is None and mix is None and launch.uses_descriptors(head.hidden, head.weight)
    if by_descriptor:
        blocks = blocks_of(launch.exp_blocks(major, head.softcap is not None, head.bias is not None))
    else:
        blocks = blocks_of(launch.exp_ptr_blocks(major, minor, plain, guard=flags is not None))
    tiles = triton.cdiv(vocab, blocks.cols)
    outputs = [
        torch.empty(tiles, n, dtype=torch.float32, device=head.hidden.device) if wanted else None
        for wanted in (sums, entropy)
    ]
    row_blocks = triton.cdiv(n, blocks.rows)
    options = {**product_options(head, blocks), "BLOCK_N": blocks.cols, "GROUP_M": GROUP_M, "LOGS": logs}
    common = (anchor, head.targets, patch, mix, head.bias, head.temperature, head.temperatures, head.softcap, *outputs)
    if by_descriptor:
        del options["EVEN_K"]
        programs = launch.programs(head.hidden.device)
        descriptors = (
            TensorDescriptor.from_tensor(head.hidden, [blocks.rows, blocks.depth]),
            TensorDescriptor.from_tensor(head.weight, [blocks.cols, blocks.depth]),
            None if exps is None else TensorDescriptor.from_tensor(exps, [blocks.rows, blocks.cols]),
        )
        flatten = flattens(major, head.softcap is not None, head.bias is not None)
        count = min(programs, row_blocks * tiles)
        # PROGRAMS does not depend on the number of rows: a new value would compile the kernel again.
        _linear_exp_fwd_kernel[(count,)](*descriptors, *common, PROGRAMS=programs, FLATTEN=flatten, **options)
    else:
        splits = tiles if flags is None else launch.GUARD_SPLITS
        _linear_exp_ptr_fwd_kernel[(row_blocks * splits,)](
            head.hidden, head.hidden.stride(0), head.weight, head.weight.stride(0), exps,
            0 if exps is None else exps.stride(0), *common, flags, SPLITS=splits, LOOP=flags is not None, **options,
        )  # fmt: skip
    return outputs


@triton.jit(**ROWS_VARY)
def _online_fwd_kernel(h_ptr, h_stride, w_ptr, w_stride, target_ptr, bias_ptr, inv_t, inv_t_ptr, cap, max_ptr,
                       total_ptr, entropy_ptr, flag_ptr, n_rows, vocab, depth, SPLITS,
                       EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_K: tl.constexpr):  # fmt: skip
    """Compute the online softmax of one row block over the vocabulary tiles of one split."""
    num_m = tl.cdiv(n_rows, BLOCK_M)
    block_m = tl.program_id(0) % num_m
    split = tl.program_id(0) // num_m
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < n_rows
    if tl.max(flagged(flag_ptr, rows, n_rows).to(tl.int32)) == 0:
        return
    scale = row_scale(inv_t, inv_t_ptr, rows, n_rows)
    target = tl.load(target_ptr + rows, mask=row_ok, other=0).to(tl.int32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    entropy = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for block_n in range(split, tl.cdiv(vocab, BLOCK_N), SPLITS):
        cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        y = dot_rows(h_ptr, h_stride, tl.minimum(rows, n_rows - 1), w_ptr, w_stride, tl.minimum(cols, vocab - 1),
                      depth, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        if bias_ptr is not None:
            y += tl.load(bias_ptr + cols, mask=cols < vocab, other=0.0).to(tl.float32)[None, :]
        if cap is not None:
            y = tanh(y * (1.0 / cap)) * cap
        x2 = y * scale[:, None]
        x2 = tl.where((cols < vocab)[None, :] & (cols[None, :] != target[:, None]), x2, float("-inf"))
        new_top = tl.maximum(top, tl.max(x2, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        e = tl.exp2(x2 - base[:, None])
        shrink = tl.exp2(top - base)
        if entropy_ptr is not None:
            # The sum is over E (x2 - top): a shift of the top by delta changes each term by E delta.
            moved = entropy + tl.where(total > 0, total * (top - base), 0.0)
            entropy = moved * shrink + tl.sum(e * tl.maximum(x2 - base[:, None], -1e30), axis=1)
        total = total * shrink + tl.sum(e, axis=1)
        top = new_top
    offset = split.to(tl.int64) * n_rows + rows
    tl.store(max_ptr + offset, top, mask=row_ok)
    tl.store(total_ptr + offset, total, mask=row_ok)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + offset, entropy, mask=row_ok)


def online_fwd(head: Head, flags: Tensor, entropy: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the online softmax of every vocabulary split of flagged rows, without the target's column.

    Only row blocks with a flagged row are computed. The outputs of the others are uninitialized. The results are
    [splits, N] fp32: the maxima of x2, the sums of 2^(x2 - maximum), and the sums of 2^(x2 - maximum) times
    (x2 - maximum), or None without `entropy`.
    """
    n, device = len(head.hidden), head.hidden.device
    blocks, splits = blocks_of(launch.ONLINE_BLOCKS), launch.GUARD_SPLITS
    row_blocks = triton.cdiv(n, blocks.rows)
    top, total, ent = (
        torch.empty(splits, n, dtype=torch.float32, device=device) if wanted else None
        for wanted in (True, True, entropy)
    )
    _online_fwd_kernel[(row_blocks * splits,)](
        head.hidden, head.hidden.stride(0), head.weight, head.weight.stride(0), head.targets, head.bias,
        head.temperature, head.temperatures, head.softcap, top, total, ent, flags, SPLITS=splits,
        BLOCK_N=blocks.cols, **product_options(head, blocks),
    )  # fmt: skip
    return top, total, ent


class RowStats(NamedTuple):
    """Results of the forward for each token. Each field is one row of a [7, N] fp32 tensor."""

    logp: torch.Tensor  # of the target
    entropy: torch.Tensor  # of the row's distribution, in nats
    anchor: torch.Tensor  # a, in the unit of y: E = exp((y - a) / T)
    slope: torch.Tensor  # -1 / (T sum_v E), the factor from a gradient of logp to v
    # The entry of E at the target for the backward: minus the sum of E over the other tokens, times the slope of the
    # soft-cap at the target.
    patch: torch.Tensor
    mass: torch.Tensor  # exp((y_t - a) / T), times the slope of the soft-cap at the target
    norm: torch.Tensor  # sum_v E

    def normalized(self) -> "RowStats":
        """Return the stats with the log-sum-exp as the anchor: E is then the probability, and norm is 1."""
        t = -1 / (self.slope * self.norm)
        return RowStats(self.logp, self.entropy, self.anchor + self.norm.log() * t, self.slope * self.norm,
                    self.patch / self.norm, self.mass / self.norm, torch.ones_like(self.norm))  # fmt: skip


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
    """Compute `RowStats` from the sums of each row; the splits of the online softmax are used for flagged rows only."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = rows < n_rows
    scale = row_scale(inv_t, inv_t_ptr, rows, n_rows)
    c = tl.load(target_y_ptr + rows, mask=ok, other=0.0)
    c2 = c * scale
    total = tl.load(total_ptr + rows, mask=ok, other=0.0)
    entropy = tl.zeros((ROWS,), dtype=tl.float32)
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
    # Not c2 - base where they are equal: fused with the product in c2, it would be the rounding error of the product.
    gap = tl.where(base == c2, base * 0.0, c2 - base)
    target_e = tl.exp2(gap)  # 1 where the anchor is the target
    norm = total + target_e
    log_norm = tl.where(base == c2, log1p(total), tl.log(norm))
    logp = gap * LN2 - log_norm
    # H = log sum_v E - sum_v E (z - a) / sum_v E
    row_entropy = log_norm - (entropy + target_e * tl.maximum(gap, -1e30)) * LN2 / norm
    bend = tl.full((ROWS,), 1.0, dtype=tl.float32)
    if cap is not None:
        bend = 1.0 - (c / cap) * (c / cap)
    patch = -total * bend
    tl.store(out_ptr + rows, logp, mask=ok)
    tl.store(out_ptr + n_rows + rows, row_entropy, mask=ok)
    # An unchanged anchor is stored bit-exactly: the guarded pass also rewrites the other rows of a block with a flagged
    # row, and they must get the same E again.
    tl.store(out_ptr + 2 * n_rows + rows, tl.where(base == c2, c, base / scale), mask=ok)
    tl.store(out_ptr + 3 * n_rows + rows, -scale * LN2 / norm, mask=ok)
    tl.store(out_ptr + 4 * n_rows + rows, patch, mask=ok)
    tl.store(out_ptr + 5 * n_rows + rows, target_e * bend, mask=ok)
    tl.store(out_ptr + 6 * n_rows + rows, norm, mask=ok)
    if e_ptr is not None:
        target = tl.load(target_ptr + rows, mask=ok, other=-1)
        # c is NaN for a target outside [0, V), and a negative target is on another rank.
        legal = ok & (c == c) & (target >= 0)
        tl.store(e_ptr + rows.to(tl.int64) * e_stride + target, patch.to(e_ptr.dtype.element_ty), mask=legal)


@triton.jit(**ROWS_VARY)
def _entropy_bwd_kernel(e_ptr, e_stride, out_ptr, out_stride, target_ptr, patch_ptr, g_ptr, h_ptr, norm_ptr,
                        entropy_ptr, vocab, BLOCK: tl.constexpr):  # fmt: skip
    """Write E (g + h (log p + H)), log p = ln E - ln norm, from log2 E, maybe in place; patch the target's entry."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(h_ptr + row)
    constant = tl.load(g_ptr + row) + h * (tl.load(entropy_ptr + row) - tl.log(tl.load(norm_ptr + row)))
    x2 = tl.load(e_ptr + row * e_stride + cols, mask=cols < vocab, other=0)
    if e_ptr.dtype.element_ty == tl.int16:
        x2 = (x2.to(tl.int32) & 0xFFFF).to(tl.float32) * (1 / 512) - 41.0
    x2 = tl.maximum(x2, -200.0)  # finite, since 0 * -inf would be NaN
    x = tl.exp2(x2) * (constant + h * LN2 * x2)
    x = tl.where(cols == tl.load(target_ptr + row), tl.load(patch_ptr + row), x)
    tl.store(out_ptr + row * out_stride + cols, x.to(out_ptr.dtype.element_ty), mask=cols < vocab)


def reduce_fwd(tiles: torch.Tensor) -> torch.Tensor:
    """Sum [vocabulary tiles, N] fp32 over the vocabulary tiles to [N], in fixed order."""
    n_tiles, n = tiles.shape
    out = torch.empty(n, dtype=torch.float32, device=tiles.device)
    _reduce_fwd_kernel[(triton.cdiv(n, launch.REDUCE_ROWS),)](
        tiles, out, n, n_tiles, ROWS=launch.REDUCE_ROWS, TILES=launch.REDUCE_TILES, **launch.options()
    )
    return out


def finish_fwd(
    head: Head, target_y: Tensor, total: Tensor, entropy: Tensor | None,
    splits: tuple[Tensor, Tensor, Tensor | None], exps: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute `RowStats` of each row, [7, N] fp32, and patch E [N, V] at the targets, if it is given.

    `total` and `entropy` [N] are the sums of E and of E x2 over all tokens except the target, with the target as the
    anchor. `splits` is the result of `online_fwd`, used for flagged rows.
    """
    n = len(target_y)
    out = torch.empty(7, n, dtype=torch.float32, device=target_y.device)
    _finish_fwd_kernel[(triton.cdiv(n, launch.REDUCE_ROWS),)](
        out, target_y, total, entropy, *splits, head.targets, exps, 0 if exps is None else exps.stride(0),
        head.temperature, head.temperatures, head.softcap, n, len(splits[0]), WITH_ENTROPY=entropy is not None,
        ROWS=launch.REDUCE_ROWS, BLOCK_SPLITS=launch.GUARD_SPLITS, **launch.options(),
    )  # fmt: skip
    return out


@launch.operator("fastgrpo::head_entropy_bwd", mutates_args=("out",))
def head_entropy_bwd(logs: Tensor, targets: Tensor, rows: Tensor, g: Tensor, h: Tensor, out: Tensor) -> None:
    """Compute `out` from log2 E and the gradients g of log-prob and h of entropy: dz = slope * out, slope from `rows`.

        out_v = E_v (g + h (log p_v + H)),   v != target

    `logs` [N, V] is log2 E, and `out` [N, V], in the dtype of the products, may use its memory. `rows` is the
    `RowStats` of the forward. g and h [N] are the fp32 gradients of the log-probs and of the entropies.
    """
    stats = RowStats(*rows.unbind(0))
    patch = g * stats.patch + h * stats.mass * (stats.logp + stats.entropy)
    block = 64 if launch.INTERPRET else 4096
    _entropy_bwd_kernel[(len(logs), triton.cdiv(logs.shape[1], block))](
        logs, logs.stride(0), out, out.stride(0), targets, patch, g, h, stats.norm, stats.entropy, logs.shape[1],
        BLOCK=block, **launch.options(),
    )  # fmt: skip


@launch.operator("fastgrpo::head_products", mutates_args=("dh", "dw", "dbias"))
def head_products(exps: Tensor, v: Tensor, hidden: Tensor, weight: Tensor, dh: Tensor | None, dw: Tensor | None,
                  dbias: Tensor | None, start: int, group: str | None) -> None:  # fmt: skip
    """Compute the gradients of one chunk from its E: write its rows of dH, and add its part to dW and dbias.

    The first chunk, which starts at row 0, overwrites dW and dbias, so that they need not be zeroed. dH [M, D] is
    written at rows `start` to `start` + n, and summed over the ranks of `group`. dW and dbias are fp32, but dW may have
    the dtype of the weight if there is only one chunk. Outputs that are None are skipped.
    """
    first = start == 0
    if len(hidden) == 0:
        for total in (dw, dbias) if first else ():
            if total is not None:
                total.zero_()
        return
    with no_autocast(hidden):
        if dh is not None:
            hidden_product(exps, v, weight, dh[start : start + len(exps)], group)
        if dw is not None:
            add_weight_product_(dw, exps, v, hidden, first)
        if dbias is not None:
            product = bias_product(exps, v)
            dbias.copy_(product) if first else dbias.add_(product)


def empty_gradients(
    rows: int, weight: Tensor, needs: Sequence[bool], scaled: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Allocate dH [rows, D], dW [V, D] and dbias [V], None if not needed.

    They are fp32 if they are `scaled` later, because rounding before and after a factor would lose precision. Otherwise
    dH has the dtype of hidden, and dW the dtype of the weight's gradient.
    """
    dtypes = (torch.float32, torch.float32) if scaled else (weight.dtype, grad_dtype(weight))
    shapes = ((rows, weight.shape[1]), weight.shape, weight.shape[:1])
    return tuple(
        torch.empty(shape, dtype=dtype, device=weight.device) if need else None
        for shape, dtype, need in zip(shapes, (*dtypes, torch.float32), needs, strict=True)
    )


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient, which may be fp32 for a bf16 weight (from torch 2.10)."""
    # The attribute grad_dtype cannot be traced, and only leaves have it.
    if torch.compiler.is_compiling() or not parameter.is_leaf:
        return parameter.dtype
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def chunk_slices(total: int, size: int) -> list[slice]:
    """Cut rows into equal chunks, rounded to 128 rows."""
    count = max(1, -(-total // size))
    step = min(size, -(-total // count // 128) * 128) if count > 1 else max(total, 1)
    return [slice(start, min(start + step, total)) for start in range(0, max(total, 1), step)]


def rows_fwd(
    head: Head, exps: Tensor | None = None, entropy: bool = False, group: str | None = None, logs: bool = False
) -> Tensor:
    """Compute `RowStats` of each row, [7, N] fp32, and fill E [N, V], if it is given, or log2 E with `logs`."""
    target_y = anchor_fwd(head)
    if group is not None:  # c comes from the rank with the target; if no rank has it, the result is NaN
        target_y = all_reduce_(torch.where(head.targets == ELSEWHERE, 0.0, target_y), group)
    # A bias may forbid the target: with an anchor of -inf, other forbidden columns would be NaN.
    anchor = target_y if head.bias is None else target_y.clamp(min=-1e30)
    sums = linear_exp_fwd(head, anchor, exps, entropy=entropy, logs=logs)
    total, entropy_sum = (None if tiles is None else all_reduce_(reduce_fwd(tiles), group) for tiles in sums)
    # Both guarded passes are always launched, to avoid a sync; programs without a flagged row return.
    splits = online_fwd(head, total, entropy)
    if group is not None:
        splits = merge_ranks(splits, group)
    rows = finish_fwd(head, target_y, total, entropy_sum, splits, None if logs else exps)
    if exps is not None:
        stats = RowStats(*rows.unbind(0))
        patch = None if logs else stats.patch
        linear_exp_fwd(head, stats.anchor, exps, patch=patch, sums=False, flags=total, logs=logs)
    return rows


def merge_ranks(splits: tuple[Tensor, Tensor, Tensor | None], group: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Merge the online softmax over the splits of all ranks into one split [1, N], equal on all ranks."""
    tops, totals, entropies = splits
    top = all_reduce_(tops.amax(0, keepdim=True), group, torch.distributed.ReduceOp.MAX)
    moved = torch.where(totals > 0, tops - top, 0.0)  # -inf - -inf would be NaN for a split with only the target
    shrink = moved.exp2()
    total = all_reduce_((totals * shrink).sum(0, keepdim=True), group)
    if entropies is None:
        return top, total, None
    entropies = (entropies + totals * moved) * shrink
    return top, total, all_reduce_(entropies.sum(0, keepdim=True), group)


def recompute_exps(head: Head, rows: RowStats, g: Tensor, h: Tensor | None, exps: Tensor) -> Tensor:
    """Recompute E [N, V] with the log-sum-exp as the anchor, by a fourth product. Return v [N], with dz = v E.

    g [N] is the gradient with respect to the log-probs, h [N] the one with respect to the entropies, or None. With h, E
    is multiplied by g + h (log p + H).
    """
    rows = rows.normalized()
    if h is None:
        linear_exp_fwd(head, rows.anchor, exps, patch=rows.patch, sums=False)
        return g * rows.slope
    mix = torch.stack([g + h * rows.entropy, h * LN2.value])
    patch = g * rows.patch + h * rows.mass * (rows.logp + rows.entropy)
    linear_exp_fwd(head, rows.anchor, exps, patch=patch, mix=mix, sums=False)
    return rows.slope


@launch.operator("fastgrpo::linear_logprob_fwd")
def linear_logprob_fwd(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
                       temperatures: Tensor | None, softcap: float | None, keep: bool, entropy: bool, logs: bool,
                       chunk_rows: int, group: str | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the stats of each row and, with `keep`, E for the backward; without `keep`, in chunks.

    The result is `RowStats` as [7, N] fp32, and E, which is [N, V] if it is kept, else [0, V]. `temperatures` [N]
    replaces `temperature` if it is given. With `logs`, log2 E is kept instead of E, for a gradient of the entropy; this
    excludes a soft-cap. See `linear_logprob` for the other arguments.
    """
    n, vocab = len(hidden), weight.shape[0]
    with no_autocast(hidden):
        head = Head(hidden, weight, bias, targets, temperature, temperatures, softcap).checked()
        exps = empty_exps(n if keep else 0, vocab, weight, logs)
        if n == 0:
            return hidden.new_zeros(7, 0, dtype=torch.float32), exps
        if keep:
            return rows_fwd(head, exps, entropy, group, logs), exps
        parts = [rows_fwd(head.cut(part), None, entropy, group) for part in chunk_slices(n, chunk_rows)]
        return (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]), exps


@linear_logprob_fwd.register_fake
def _(hidden, weight, bias, targets, temperature, temperatures, softcap, keep, entropy, logs, chunk_rows, group):
    n, vocab = len(hidden), weight.shape[0]
    return hidden.new_empty(7, n, dtype=torch.float32), empty_exps(n if keep else 0, vocab, weight, logs)


@launch.operator("fastgrpo::linear_logprob_bwd", mutates_args=("dh", "dw", "dbias"))
def linear_logprob_bwd(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
                       temperatures: Tensor | None, softcap: float | None, rows: Tensor, g: Tensor,
                       h: Tensor | None, dh: Tensor | None, dw: Tensor | None, dbias: Tensor | None, chunk_rows: int,
                       group: str | None) -> None:  # fmt: skip
    """Recompute E in chunks, and write the gradients.

    For the arguments up to `softcap` see `linear_logprob_fwd`, which returned `rows`. g [N] and h [N] (or None) are
    the fp32 gradients of log-probs and entropies. `empty_gradients` allocates dh, dw and dbias.
    """
    slices = chunk_slices(len(hidden), chunk_rows)
    total = dw if dw is None or len(slices) == 1 else torch.empty_like(dw, dtype=torch.float32)
    with no_autocast(hidden):
        head = Head(hidden, weight, bias, targets, temperature, temperatures, softcap).checked()
        room = empty_exps(slices[0].stop, weight.shape[0], weight)  # for the exponentials of any chunk
        for part in slices:
            exps, v = room[: part.stop - part.start], g[part]
            if len(v):
                stats = RowStats(*rows[:, part].unbind(0))
                v = recompute_exps(head.cut(part), stats, v, None if h is None else h[part], exps)
            head_products(exps, v, hidden[part], weight, dh, total, dbias, part.start, group)
    if total is not dw:
        dw.copy_(total)


class LinearLogprob(torch.autograd.Function):
    """Log-probs [N] and entropy [N], fp32, differentiable by hidden, weight and bias.

    `needs` flags which of the three need a gradient, because ctx.needs_input_grad stays True under no_grad.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, temperatures, softcap, needs, return_entropy,
                chunk_rows, group, sum_hidden_grad):  # fmt: skip
        ctx.set_materialize_grads(False)
        # Under a soft-cap, E must include its slope, which log2 E cannot.
        keep = any(needs) and len(hidden) <= chunk_rows and not (return_entropy and softcap is not None)
        ctx.logs = keep and return_entropy
        rows, exps = linear_logprob_fwd(hidden, weight, bias, targets, temperature, temperatures, softcap, keep,
                                        return_entropy, ctx.logs, chunk_rows, group)  # fmt: skip
        if any(needs):
            ctx.save_for_backward(hidden, weight, bias, targets, temperatures, rows, exps)
        ctx.options = (temperature, softcap, needs, chunk_rows, group if sum_hidden_grad else None, keep)
        return rows[0].clone(), rows[1].clone()

    @staticmethod
    @first_order("linear_logprob")
    def backward(ctx, grad_logps, grad_entropy):
        hidden, weight, bias, targets, temperatures, rows, exps = ctx.saved_tensors
        temperature, softcap, needs, chunk_rows, group, keep = ctx.options
        g = torch.zeros_like(rows[0]) if grad_logps is None else grad_logps.contiguous()
        h = None if grad_entropy is None else grad_entropy.contiguous()
        dh, dw, db = gradients = empty_gradients(len(hidden), weight, needs)
        if not keep:
            linear_logprob_bwd(hidden, weight, bias, targets, temperature, temperatures, softcap, rows, g, h,
                               *gradients, chunk_rows, group)  # fmt: skip
        elif not ctx.logs:
            head_products(exps, g * rows[3], hidden, weight, *gradients, 0, group)
        else:
            mixed = empty_exps(*exps.shape, weight)
            head_entropy_bwd(exps, targets, rows, g, torch.zeros_like(g) if h is None else h, mixed)
            head_products(mixed, rows[3], hidden, weight, *gradients, 0, group)
        return dh, dw, None if db is None else db.to(grad_dtype(bias)), *(None,) * 9


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    group: str | None = None,
    sum_hidden_grad: bool = True,
    chunk_rows: int = launch.CHUNK_ROWS,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs of targets under softmax(softcap(hidden @ weight.T + bias) / temperature), differentiably.

    Args:
        hidden: [N, D] bf16.
        weight: [V, D] in the dtype of hidden.
        targets: [N] int64 in [0, V), or from `Vocabulary.located` if the weight is sharded. An invalid target gives
            NaN in its row.
        bias: [V] or None.
        temperature: A float, or [N].
        softcap: Cap of the logits, or None.
        return_entropy: Whether to compute the entropy.
        group: Name of the process group of a sharded weight, or None.
        sum_hidden_grad: Whether to sum the gradient of hidden over the group. If not, each rank gets the part of its
            shard.
        chunk_rows: Maximum rows per chunk of exponentials.

    Returns:
        logps [N] fp32, and the entropy [N] fp32 in nats, or None.
    """
    needs = needed(hidden, weight, bias)
    per_row = isinstance(temperature, torch.Tensor)
    logps, entropy = LinearLogprob.apply(
        hidden, weight, bias, targets.contiguous(), 1.0 if per_row else float(temperature),
        temperature if per_row else None, softcap, needs, return_entropy, chunk_rows, group, sum_hidden_grad,
    )  # fmt: skip
    return logps, entropy if return_entropy else None


class LinearGRPO(torch.autograd.Function):
    """Returns the loss, an fp32 scalar, and a dict of [M] values: logps, metrics, and on request the entropy.

    Only the loss is differentiable. `needs` flags which of hidden, weight and bias need a gradient, because
    ctx.needs_input_grad stays True under no_grad.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, objective, needs, return_entropy, softcap, chunk_rows,
                group):  # fmt: skip
        ctx.set_materialize_grads(False)
        bonus = None if rows.entropy_weights is None else rows.entropy_weights.float()
        with_entropy = return_entropy or bonus is not None
        per_row = isinstance(rows.temperature, torch.Tensor)
        t, ts = (1.0, rows.temperature) if per_row else (float(rows.temperature), None)

        def head_fwd(part, keep):
            h = _gather(hidden, rows.index, rows.active, part)
            stats, exps = linear_logprob_fwd(h, weight, bias, rows.targets[part], t, cut(ts, part), softcap, keep,
                                             with_entropy, keep and bonus is not None, chunk_rows, group)  # fmt: skip
            if rows.active is not None:  # inactive rows have target 0, whose log-prob a bias may make -inf
                stats[0].masked_fill_(~rows.active[part], 0)
            return h, stats, exps

        m = len(rows.targets)
        keeps = any(needs) and (bonus is None or softcap is None)
        everything = slice(0, m)
        ctx.form, known = "one", None
        parts = [(everything, slice(None))]
        if keeps and m > chunk_rows:
            ctx.form = "many"
            slices = chunk_slices(m, chunk_rows)
            parts, known = policy_parts(
                rows, objective, slices, chunk_rows, policy_loss_fwd, lambda: head_fwd(everything, False)[1][0]
            )
        elif not keeps:
            ctx.form = "recompute" if any(needs) else "none"
        sums = empty_gradients(m, weight, needs, scaled=True) if ctx.form == "many" else None
        outputs = []
        for part, sequences in parts:
            h, stats, exps = head_fwd(part, keeps)
            if known is None:
                loss, g, metrics = policy_loss_fwd(stats[0], rows.cut(part, sequences), objective)
            else:
                loss, g = known[0][part], known[1][part]
                metrics = {name: values[part] for name, values in known[2].items()}
            part_bonus = cut(bonus, part)
            if part_bonus is not None:
                loss = loss - part_bonus * stats[1]  # - sum_n e_n H_n
            v = g
            if keeps:
                v = g * stats[3]
                if part_bonus is not None:
                    logs, exps = exps, exps.view(weight.dtype)
                    head_entropy_bwd(logs, rows.targets[part], stats, g, -part_bonus, exps)
                    v, logs = stats[3], None
            if sums is not None:
                head_products(exps, v, h, weight, *sums, part.start, group)
                exps = None  # free before the next chunk allocates its own
            entropy = {"entropy": stats[1]} if with_entropy else {}
            outputs.append({"loss": loss, "logps": stats[0], **entropy, **metrics})
        if ctx.form == "one":
            ctx.save_for_backward(hidden, weight, bias, rows.index, rows.active, exps, v)
        elif ctx.form == "many":
            ctx.save_for_backward(rows.index, *sums)
        elif ctx.form == "recompute":
            ctx.save_for_backward(hidden, weight, bias, rows.index, rows.active, rows.targets, ts, stats, g, bonus)
        ctx.dtypes = (hidden.dtype, grad_dtype(weight), None if bias is None else grad_dtype(bias))
        ctx.options = (needs, t, softcap, chunk_rows, group, hidden.shape)
        merged = {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}
        return merged.pop("loss").sum(dtype=torch.float64).float(), merged

    @staticmethod
    @first_order("linear_grpo_loss")
    def backward(ctx, grad_loss, _):
        if grad_loss is None:
            return (None,) * 10
        needs, t, softcap, chunk_rows, group, shape = ctx.options
        saved = ctx.saved_tensors  # read only once, because a checkpointed region provides them only once
        if ctx.form == "many":
            # Out of place, because the saved sums may be needed again (retain_graph). One pass scales and rounds.
            index, *sums = saved
            dh, dw, db = (
                None if x is None else torch.mul(x, grad_loss, out=torch.empty_like(x, dtype=dtype))
                for x, dtype in zip(sums, ctx.dtypes, strict=True)
            )
            return _scatter(dh, index, shape), dw, db, *(None,) * 7
        hidden, weight, bias, index, active = saved[:5]
        h = _gather(hidden, index, active, slice(None))
        dh, dw, db = gradients = empty_gradients(len(h), weight, needs)
        if ctx.form == "one":
            exps, v = saved[5:]
            head_products(exps, v * grad_loss, h, weight, *gradients, 0, group)
        else:
            targets, ts, stats, g, bonus = saved[5:]
            entropy_grad = None if bonus is None else -bonus * grad_loss
            linear_logprob_bwd(h, weight, bias, targets, t, ts, softcap, stats, g * grad_loss, entropy_grad,
                               *gradients, chunk_rows, group)  # fmt: skip
        return _scatter(dh, index, shape), dw, None if db is None else db.to(ctx.dtypes[2]), *(None,) * 7


def _gather(hidden, index, active, part):
    """Return the kept hidden states of a slice, with 0 for inactive tokens: v = 0 times a NaN would make dW NaN."""
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
    chunk_rows: int = launch.CHUNK_ROWS,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss from hidden states, differentiably.

        loss = sum_n w_n (I_n s_n + beta KL_n) - sum_n e_n H_n

    Args:
        hidden: [N, D] bf16.
        weight: [V, D] in the dtype of hidden.
        bias: [V] or None.
        rows: The M kept tokens; e_n are its entropy weights.
        objective: An Objective.
        return_entropy: Whether to return the entropy.
        softcap: Cap of the logits, or None.
        group: Name of the process group of a sharded weight, with targets from `Vocabulary.located`, or None.
        chunk_rows: Maximum rows per chunk of exponentials.

    Returns:
        The loss, a scalar; and log-probs and metrics by name, [M] each, with the entropy on request.
    """
    needs = needed(hidden, weight, bias)
    return LinearGRPO.apply(hidden, weight, bias, rows, objective, needs, return_entropy, softcap, chunk_rows, group)
