"""Matrix products whose epilogue turns logits into exponentials; the logits themselves never reach memory.

    y_nv = softcap(h_n . w_v + b_v),   E_nv = exp((y_nv - a_n) / T_n),   softcap(x) = cap tanh(x / cap)

a_n is the anchor of the row. The anchored forward takes the target's own y, and so needs neither a running maximum nor
a second pass; a backward that recomputes takes the log-sum-exp, and E is then the probability. All arithmetic after the
bf16 or fp16 products is fp32; exponents are kept in base 2, x2 = x log2(e) / T.

| kernel | writes | runs as |
|--------|--------|---------|
| `_anchor_fwd_kernel` | c_n = y at the target | one program a row block |
| `_linear_exp_fwd_kernel` | E, row sums of each vocabulary tile | persistent, host tensor descriptors (sm_90, sm_100) |
| `_linear_exp_ptr_fwd_kernel` | the same | one tile a program, pointer loads (sm_80, sm_89, unaligned D, guard) |

Shapes: N rows of hidden states (tokens), V vocabulary, D hidden size; hidden [N, D], weight [V, D]. The row sums are
[vocabulary tiles, N], so that the reduction over the tiles reads neighbouring rows side by side.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fastgrpo.kernels import launch
from fastgrpo.kernels.tiles import ROWS_VARY, Head, blocks_of, dot_rows, flagged, product_options, row_scale, tanh

# Row blocks whose tiles run side by side. One wave of programs then computes about 16 x 128 rows by 8 x 256 columns,
# which reads the fewest bytes of both operands.
GROUP_M = 16
# E's rows are allocated by this many on a GPU: M differs from step to step, and memory that torch's allocator has kept
# of one step fits the next one where their sizes are the same. A chunk of 8,192 rows has 8 sizes.
ROWS_HELD = 1024


@triton.jit
def _grouped(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Return (row block, vocabulary tile) of a tile number, GROUP_M row blocks at a time: a wave shares operands."""
    width = GROUP_M * num_n
    first_m = tile // width * GROUP_M
    group = tl.minimum(num_m - first_m, GROUP_M)
    return first_m + tile % width % group, tile % width // group


@triton.jit
def _exp_epilogue(acc, rows, block_n, n_rows, vocab, anchor_ptr, target_ptr, patch_ptr, mix_ptr, bias_ptr, inv_t,
                  inv_t_ptr, cap, BEND: tl.constexpr, SUM: tl.constexpr, ENTROPY: tl.constexpr,
                  BLOCK_N: tl.constexpr):  # fmt: skip
    """Turn a tile of products into (what is stored, sum_v E, sum_v E x2); the sums leave the target's column out."""
    first = block_n * BLOCK_N
    row_ok = rows < n_rows
    y = acc
    if bias_ptr is not None:
        cols = first + tl.arange(0, BLOCK_N)  # made again below, where keeping it would cost registers
        y += tl.load(bias_ptr + cols, mask=cols < vocab, other=0.0).to(tl.float32)[None, :]
    if cap is not None:
        bent = tanh(y * (1.0 / cap))
        y = bent * cap
    scale = row_scale(inv_t, inv_t_ptr, rows, n_rows)
    anchor = tl.load(anchor_ptr + rows, mask=row_ok, other=0.0)
    # One multiply-add an element. The product of anchor and scale is rounded, which moves x2 of a row by half a unit in
    # the last place of the anchor: as much as rounding the logit to fp32 does.
    x2 = tl.fma(y, tl.broadcast_to(scale[:, None], y.shape), tl.broadcast_to((-anchor * scale)[:, None], y.shape))
    e = tl.exp2(x2)
    stored = e
    if mix_ptr is not None:
        constant = tl.load(mix_ptr + rows, mask=row_ok, other=0.0)
        slope = tl.load(mix_ptr + n_rows + rows, mask=row_ok, other=0.0)
        stored = e * (constant[:, None] + slope[:, None] * tl.maximum(x2, -1e30))
    if cap is not None and BEND:
        stored *= 1.0 - bent * bent  # the cap's slope: dy/dx = 1 - tanh^2
    total = tl.zeros_like(anchor)
    entropy = tl.zeros_like(anchor)
    if SUM or patch_ptr is not None:
        target = tl.load(target_ptr + rows, mask=row_ok, other=-1).to(tl.int32)
        # Few tiles hold a target or end past V, and the others need no masks. With a bias or an entropy, two ways to
        # the sums would need more registers than there are.
        plain = False
        if bias_ptr is None and not ENTROPY:
            ends = first + BLOCK_N
            plain = (tl.max(((target >= first) & (target < ends)).to(tl.int32)) == 0) & (ends <= vocab)
        if plain:
            total = tl.sum(e, axis=1)
        else:
            cols = first + tl.arange(0, BLOCK_N)
            is_target = cols[None, :] == target[:, None]
            if patch_ptr is not None:
                stored = tl.where(is_target, tl.load(patch_ptr + rows, mask=row_ok, other=0.0)[:, None], stored)
            if SUM:
                # Columns past V are zeros that the load filled in; they must not count as logits of 0.
                others = tl.where((cols < vocab)[None, :] & (is_target == 0), e, 0.0)
                total = tl.sum(others, axis=1)
                if ENTROPY:
                    entropy = tl.sum(others * tl.maximum(x2, -1e30), axis=1)  # finite, since 0 * -inf would be NaN
    return stored, total, entropy


@triton.jit(**ROWS_VARY)
def _linear_exp_fwd_kernel(h_desc, w_desc, e_desc, anchor_ptr, target_ptr, patch_ptr, mix_ptr, bias_ptr, inv_t,
                           inv_t_ptr, cap, total_ptr, entropy_ptr, n_rows, vocab, depth, PROGRAMS: tl.constexpr,
                           GROUP_M: tl.constexpr, FLATTEN: tl.constexpr, BEND: tl.constexpr, BLOCK_M: tl.constexpr,
                           BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Compute every PROGRAMS-th tile; loads and stores go through tensor descriptors."""
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
                                          bias_ptr, inv_t, inv_t_ptr, cap, BEND, total_ptr is not None,
                                          entropy_ptr is not None, BLOCK_N)  # fmt: skip
        if e_desc is not None:
            e_desc.store([block_m * BLOCK_M, block_n * BLOCK_N], e.to(e_desc.dtype))
        _store_sums(total_ptr, entropy_ptr, total, entropy, block_n, rows, n_rows)


@triton.jit
def _store_sums(total_ptr, entropy_ptr, total, entropy, block_n, rows, n_rows):
    """Store the row sums of one vocabulary tile, where they are asked for."""
    if total_ptr is not None:
        tl.store(total_ptr + block_n.to(tl.int64) * n_rows + rows, total, mask=rows < n_rows)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + block_n.to(tl.int64) * n_rows + rows, entropy, mask=rows < n_rows)


@triton.jit
def _exp_tile(h_ptr, h_stride, w_ptr, w_stride, e_ptr, e_stride, anchor_ptr, target_ptr, patch_ptr, mix_ptr, bias_ptr,
              inv_t, inv_t_ptr, cap, total_ptr, entropy_ptr, n_rows, vocab, depth, rows, block_n,
              BEND: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Compute and store one tile of the kernel with pointer loads."""
    cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = dot_rows(h_ptr, h_stride, tl.minimum(rows, n_rows - 1), w_ptr, w_stride, tl.minimum(cols, vocab - 1),
                   depth, PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
    e, total, entropy = _exp_epilogue(acc, rows, block_n, n_rows, vocab, anchor_ptr, target_ptr, patch_ptr, mix_ptr,
                                      bias_ptr, inv_t, inv_t_ptr, cap, BEND, total_ptr is not None,
                                      entropy_ptr is not None, BLOCK_N)  # fmt: skip
    if e_ptr is not None:
        e_ptrs = e_ptr + rows.to(tl.int64)[:, None] * e_stride + cols[None, :]
        tl.store(e_ptrs, e.to(e_ptr.dtype.element_ty), mask=(rows < n_rows)[:, None] & (cols < vocab)[None, :])
    _store_sums(total_ptr, entropy_ptr, total, entropy, block_n, rows, n_rows)


@triton.jit(**ROWS_VARY)
def _linear_exp_ptr_fwd_kernel(h_ptr, h_stride, w_ptr, w_stride, e_ptr, e_stride, anchor_ptr, target_ptr, patch_ptr,
                               mix_ptr, bias_ptr, inv_t, inv_t_ptr, cap, total_ptr, entropy_ptr, flag_ptr, n_rows,
                               vocab, depth, SPLITS, LOOP: tl.constexpr, GROUP_M: tl.constexpr, BEND: tl.constexpr,
                               PRECISION: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
                               BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Compute one tile, or with LOOP every SPLITS-th tile of a row block; row blocks without a flag return."""
    block_m, split = _grouped(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), SPLITS, GROUP_M)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if flag_ptr is not None:  # noqa: SIM102 - known at compile time, unlike the inner one
        if tl.max(flagged(flag_ptr, rows, n_rows).to(tl.int32)) == 0:
            return
    if LOOP:
        for block_n in range(split, tl.cdiv(vocab, BLOCK_N), SPLITS):
            _exp_tile(h_ptr, h_stride, w_ptr, w_stride, e_ptr, e_stride, anchor_ptr, target_ptr, patch_ptr, mix_ptr,
                      bias_ptr, inv_t, inv_t_ptr, cap, total_ptr, entropy_ptr, n_rows, vocab, depth, rows, block_n,
                      BEND, PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
    else:  # the loop costs 40 registers, and at 256 columns it would spill
        _exp_tile(h_ptr, h_stride, w_ptr, w_stride, e_ptr, e_stride, anchor_ptr, target_ptr, patch_ptr, mix_ptr,
                  bias_ptr, inv_t, inv_t_ptr, cap, total_ptr, entropy_ptr, n_rows, vocab, depth, rows, split,
                  BEND, PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip


@triton.jit(**ROWS_VARY)
def _anchor_fwd_kernel(h_ptr, h_stride, w_ptr, w_stride, target_ptr, bias_ptr, cap, out_ptr, n_rows, vocab, depth,
                       PRECISION: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_K: tl.constexpr):  # fmt: skip
    """Compute y at the targets of one row block, as the diagonal of a product."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    target = tl.load(target_ptr + rows, mask=rows < n_rows, other=0)
    legal = (target >= 0) & (target < vocab)
    target = tl.where(legal, target, 0).to(tl.int32)
    acc = dot_rows(h_ptr, h_stride, tl.minimum(rows, n_rows - 1), w_ptr, w_stride, target, depth, PRECISION, EVEN_K,
                    BLOCK_M, BLOCK_M, BLOCK_K)  # fmt: skip
    # The diagonal of this product is rounded as the main product is. A gather followed by a dot product is not: its
    # one-sided error of 1e-4 would go into every log-prob.
    i = tl.arange(0, BLOCK_M)
    y = tl.sum(tl.where(i[:, None] == i[None, :], acc, 0.0), axis=1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + target).to(tl.float32)
    if cap is not None:
        y = tanh(y * (1.0 / cap)) * cap
    tl.store(out_ptr + rows, tl.where(legal, y, float("nan")), mask=rows < n_rows)


def empty_exps(rows: int, vocab: int, like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised [rows, vocab] whose pitch is a multiple of 64 elements: bulk copies want 16 bytes."""
    held = rows if like.device.type == "cpu" else -(-rows // ROWS_HELD) * ROWS_HELD
    return torch.empty(held, -(-vocab // 64) * 64, dtype=like.dtype, device=like.device)[:rows, :vocab]


def anchor_fwd(head: Head) -> torch.Tensor:
    """Compute y at the target of each row, the anchor of the anchored forward.

    Returns:
        [N] fp32; NaN where the target is outside of [0, V).
    """
    n = len(head.hidden)
    out = torch.empty(n, dtype=torch.float32, device=head.hidden.device)
    blocks = blocks_of(launch.anchor_blocks(head.hidden.dtype))
    _anchor_fwd_kernel[(triton.cdiv(n, blocks.rows),)](
        head.hidden, head.hidden.stride(0), head.weight, head.weight.stride(0), head.targets, head.bias, head.softcap,
        out, **product_options(head, blocks),
    )  # fmt: skip
    return out


def flattens(has_bias: bool) -> bool:
    """Return whether the persistent kernel makes one loop of its tiles and of their depth.

    The loads of the next tile are then under way during the epilogue of this one. With a bias that would spill.
    """
    return not has_bias


def linear_exp_fwd(
    head: Head,
    anchor: torch.Tensor,
    exps: torch.Tensor | None = None,
    patch: torch.Tensor | None = None,
    mix: torch.Tensor | None = None,
    sums: bool = True,
    entropy: bool = False,
    flags: torch.Tensor | None = None,
    bend: bool = True,
) -> list[torch.Tensor | None]:
    """Write E of the module docstring into `exps`, and return its sums over each vocabulary tile.

    Args:
        head: The checked arguments of the head.
        anchor: [N] fp32, a of each row.
        exps: [N, V] with contiguous rows of any pitch, which E is written to; None stores nothing.
        patch: [N] fp32, what is stored at the target's column in place of its exponential, or None.
        mix: [2, N] fp32. E is stored times mix[0] + mix[1] x2, which brings in an entropy gradient. None is a factor
            of 1.
        sums: Whether sum_v E is returned, the target's column left out.
        entropy: Whether sum_v E x2 is returned, the target's column left out.
        flags: [N] fp32 row sums. Only row blocks that hold a flagged row (`tiles.flagged`) are computed. None computes
            all.
        bend: Whether E carries the slope of the soft-cap, as the gradient wants it. The sums never do.

    Returns:
        The sums and the entropy sums, each [vocabulary tiles, N] fp32, or None where not asked for.
    """
    n, vocab = len(head.hidden), head.weight.shape[0]
    major, minor = launch.capability(head.hidden.device)
    plain = head.softcap is None and not entropy and head.hidden.shape[1] % 64 == 0 and flags is None and mix is None
    by_descriptor = flags is None and mix is None and launch.uses_descriptors(head.hidden, head.weight)
    if by_descriptor:
        blocks = blocks_of(launch.exp_blocks(major, head.softcap is not None, head.bias is not None))
    else:
        tf32 = launch.precision(head.hidden.dtype) == "tf32"
        blocks = blocks_of(launch.exp_ptr_blocks(major, minor, head.hidden.dtype, tf32, plain))
    tiles = triton.cdiv(vocab, blocks.cols)
    outputs = [
        torch.empty(tiles, n, dtype=torch.float32, device=head.hidden.device) if wanted else None
        for wanted in (sums, entropy)
    ]
    row_blocks = triton.cdiv(n, blocks.rows)
    options = {**product_options(head, blocks), "BLOCK_N": blocks.cols, "GROUP_M": GROUP_M, "BEND": bend}
    common = (anchor, head.targets, patch, mix, head.bias, head.temperature, head.temperatures, head.softcap, *outputs)
    if by_descriptor:
        del options["PRECISION"], options["EVEN_K"]
        count = min(launch.programs(head.hidden.device), row_blocks * tiles)
        descriptors = (
            TensorDescriptor.from_tensor(head.hidden, [blocks.rows, blocks.depth]),
            TensorDescriptor.from_tensor(head.weight, [blocks.cols, blocks.depth]),
            None if exps is None else TensorDescriptor.from_tensor(exps, [blocks.rows, blocks.cols]),
        )
        flatten = flattens(head.bias is not None)
        _linear_exp_fwd_kernel[(count,)](*descriptors, *common, PROGRAMS=count, FLATTEN=flatten, **options)
    else:
        splits = tiles if flags is None else launch.GUARD_SPLITS
        _linear_exp_ptr_fwd_kernel[(row_blocks * splits,)](
            head.hidden, head.hidden.stride(0), head.weight, head.weight.stride(0), exps,
            0 if exps is None else exps.stride(0), *common, flags, SPLITS=splits, LOOP=flags is not None, **options,
        )  # fmt: skip
    return outputs
