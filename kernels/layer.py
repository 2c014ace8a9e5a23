"""The small operations of a layer in a decode step, in one launch each.

    add_rms_norm      h <- h + a,  y = w h / sqrt(mean(h^2) + eps)
    rotate_and_store  y = x cos + rotate_half(x) sin, of queries and keys; keys and values go into the slots
    silu_mul          y = silu(gate) up

Results are rounded where the layers of transformers round them. Only a rotation, which they round three times, is
rounded once.

Shapes: n lanes, D hidden, F width of the MLP, H query heads, K key heads, d width of a head, C tokens of a slot.
"""

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch

HEADS = 8  # heads per program
MLP_BLOCK = 1024  # columns per program


@triton.jit
def _add_rms_norm_fwd_kernel(h_ptr, added_ptr, w_ptr, y_ptr, eps, depth, BLOCK: tl.constexpr):
    """One program per row of h [n, D]."""
    columns = tl.arange(0, BLOCK)
    mask = columns < depth
    places = tl.program_id(0).to(tl.int64) * depth + columns
    h = tl.load(h_ptr + places, mask=mask, other=0.0)
    if added_ptr is not None:
        h = (h.to(tl.float32) + tl.load(added_ptr + places, mask=mask, other=0.0).to(tl.float32)).to(h.dtype)
        tl.store(h_ptr + places, h, mask=mask)
    x = h.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / depth + eps)).to(h.dtype)
    w = tl.load(w_ptr + columns, mask=mask, other=0.0)
    tl.store(y_ptr + places, normed.to(tl.float32) * w.to(tl.float32), mask=mask)


@triton.jit
def _rotate_fwd_kernel(x_ptr, cos_ptr, sin_ptr, qw_ptr, kw_ptr, k_ptr, v_ptr, token_ptr, eps, slot_stride, head_stride,
                       token_stride, q_heads, k_heads, HALF: tl.constexpr, HEADS: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """One program per lane and block of the heads of x [n, H + 2K, d], whose queries are replaced."""
    lane = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    depth = tl.arange(0, BLOCK)[None, :]
    mask = (heads < q_heads + 2 * k_heads) & (depth < HALF)
    is_query, is_value = heads < q_heads, heads >= q_heads + k_heads
    x_ptrs = x_ptr + (lane * (q_heads + 2 * k_heads) + heads) * (2 * HALF) + depth
    first = tl.load(x_ptrs, mask=mask, other=0.0)
    second = tl.load(x_ptrs + HALF, mask=mask, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if qw_ptr is not None:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
        w_ptrs = tl.where(is_query, qw_ptr + depth, kw_ptr + depth)
        w_mask = mask & (heads < q_heads + k_heads)
        wa, wb = tl.load(w_ptrs, mask=w_mask, other=0.0), tl.load(w_ptrs + HALF, mask=w_mask, other=0.0)
        a = ((a * scale).to(first.dtype).to(tl.float32) * wa.to(tl.float32)).to(first.dtype).to(tl.float32)
        b = ((b * scale).to(first.dtype).to(tl.float32) * wb.to(tl.float32)).to(first.dtype).to(tl.float32)
    angles = lane * (2 * HALF) + depth  # the second half of the angles equals the first
    cos = tl.load(cos_ptr + angles, mask=depth < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angles, mask=depth < HALF, other=0.0).to(tl.float32)
    rotated_a, rotated_b = (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)
    tl.store(x_ptrs, rotated_a, mask=mask & is_query)
    tl.store(x_ptrs + HALF, rotated_b, mask=mask & is_query)
    slot = lane * slot_stride + tl.load(token_ptr + lane) * token_stride
    k_ptrs = k_ptr + slot + (heads - q_heads) * head_stride + depth
    is_key = mask & (heads >= q_heads) & (heads < q_heads + k_heads)
    tl.store(k_ptrs, rotated_a, mask=is_key)
    tl.store(k_ptrs + HALF, rotated_b, mask=is_key)
    v_ptrs = v_ptr + slot + (heads - q_heads - k_heads) * head_stride + depth
    tl.store(v_ptrs, first, mask=mask & is_value)
    tl.store(v_ptrs + HALF, second, mask=mask & is_value)


@triton.jit
def _silu_mul_fwd_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr):
    """One program per row and block of columns of x [n, 2F], the gate before the factor."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    x_ptrs = x_ptr + row * (2 * width) + columns
    gate = tl.load(x_ptrs, mask=mask, other=0.0)
    up = tl.load(x_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(gate.dtype)
    tl.store(y_ptr + row * width + columns, silu.to(tl.float32) * up, mask=mask)


@launch.on_its_device
def add_rms_norm(hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `added` [n, D] to `hidden` [n, D] in place, and return its RMSNorm. Both are contiguous."""
    rows, width = hidden.shape
    out, block = torch.empty_like(hidden), triton.next_power_of_2(width)
    assert hidden.is_contiguous() and (added is None or (added.is_contiguous() and added.shape == hidden.shape))
    warps = min(max(block // 512, 4), 16)
    if rows:
        _add_rms_norm_fwd_kernel[(rows,)](hidden, added, weight, out, eps, width, BLOCK=block, **launch.options(warps))
    return out


@launch.on_its_device
def rotate_and_store(
    packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    token_index: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None = None, eps: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Rotate queries and keys, and write keys and values into the slots of the lanes.

    Args:
        packed: [n, H + 2K, d], contiguous: queries, keys and values. The queries are replaced.
        cos: [n, d], contiguous. Its second half equals the first.
        sin: As `cos`.
        keys: [slots >= n, K, C, d] with any strides but the last.
        values: As `keys`, with equal strides.
        token_index: [n] int64, the place in the slot of each lane.
        norms: Weights [d] of the RMSNorm of each query and key before the rotation, or None.
        eps: Added to their mean square.

    Returns:
        The rotated queries [n, H, d], a view of `packed`.
    """
    lanes, heads, depth = packed.shape
    q_heads, half = heads - 2 * keys.shape[1], depth // 2
    assert packed.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and depth % 2 == 0
    assert cos.shape == sin.shape == (lanes, depth) and keys.stride() == values.stride() and keys.stride(-1) == 1
    q_weight, k_weight = norms or (None, None)
    if lanes:
        _rotate_fwd_kernel[(lanes, triton.cdiv(heads, HEADS))](
            packed, cos, sin, q_weight, k_weight, keys, values, token_index, eps, *keys.stride()[:3], q_heads,
            keys.shape[1], HALF=half, HEADS=HEADS, BLOCK=triton.next_power_of_2(half), **launch.options(),
        )  # fmt: skip
    return packed[:, :q_heads]


@launch.on_its_device
def silu_mul(packed: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [n, F] of gate and up, side by side in `packed` [n, 2F], contiguous."""
    rows, width = len(packed), packed.shape[1] // 2
    assert packed.is_contiguous()
    out, block = packed.new_empty(rows, width), MLP_BLOCK if not launch.INTERPRET else 32
    if rows:
        _silu_mul_fwd_kernel[(rows, triton.cdiv(width, block))](packed, out, width, BLOCK=block, **launch.options())
    return out
