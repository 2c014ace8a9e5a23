"""Online softmax of hidden @ weight.T without the logits: the forward of fp16 and fp32, and of flagged bf16 rows.

    x2 = log2(e) y / T,   m = max_v x2,   s = sum_v 2^(x2 - m),   k = sum_v 2^(x2 - m) (x2 - m),   v != target

The maximum and the sums run along the vocabulary tiles of one split (Milakov and Gimelshein, arXiv 1805.02867). One
program computes one (row block, split); `head_rows.finish_fwd` merges the splits of a row in fixed order.

Shapes: N rows of hidden states (tokens), V vocabulary, D hidden size.
"""

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch
from fastgrpo.kernels.tiles import ROWS_VARY, Head, blocks_of, dot_rows, flagged, product_options, row_scale, tanh


@triton.jit(**ROWS_VARY)
def _online_fwd_kernel(h_ptr, h_stride, w_ptr, w_stride, target_ptr, bias_ptr, inv_t, inv_t_ptr, cap, max_ptr,
                       total_ptr, entropy_ptr, flag_ptr, n_rows, vocab, depth, SPLITS, PRECISION: tl.constexpr,
                       EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_K: tl.constexpr):  # fmt: skip
    """Compute the online softmax of one row block over the vocabulary tiles of one split."""
    num_m = tl.cdiv(n_rows, BLOCK_M)
    block_m = tl.program_id(0) % num_m
    split = tl.program_id(0) // num_m
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < n_rows
    if flag_ptr is not None:  # noqa: SIM102 - known at compile time, unlike the inner one
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
                      depth, PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
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
            # The sum is over E (x2 - top): moving the top by delta moves each term by E delta.
            moved = entropy + tl.where(total > 0, total * (top - base), 0.0)
            entropy = moved * shrink + tl.sum(e * tl.maximum(x2 - base[:, None], -1e30), axis=1)
        total = total * shrink + tl.sum(e, axis=1)
        top = new_top
    offset = split.to(tl.int64) * n_rows + rows
    tl.store(max_ptr + offset, top, mask=row_ok)
    tl.store(total_ptr + offset, total, mask=row_ok)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + offset, entropy, mask=row_ok)


def online_fwd(
    head: Head, entropy: bool = False, flags: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the online softmax of every vocabulary split, the target's column left out.

    Args:
        head: The checked arguments of the head.
        entropy: Whether the entropy sums are computed.
        flags: [N] fp32 row sums. Only row blocks that hold a flagged row (`tiles.flagged`) are computed, the others
            stay unwritten. None computes all.

    Returns:
        [splits, N] fp32 each: the maxima of x2, the sums of 2^(x2 - maximum), and the sums of 2^(x2 - maximum) times
        (x2 - maximum), or None without `entropy`.
    """
    n, device = len(head.hidden), head.hidden.device
    dtype = head.hidden.dtype
    blocks = blocks_of(launch.online_blocks(dtype, launch.precision(dtype) == "tf32"))
    row_blocks = triton.cdiv(n, blocks.rows)
    splits = launch.GUARD_SPLITS if flags is not None else launch.online_splits(row_blocks, device)
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
