"""Decode attention of G lanes that share a prompt: each lane attends to its prompt and itself (Hydragen, 2402.05099).

    o = sum_s 2^(l_s - l) o_s,   l = log2 sum_s 2^(l_s),   s over splits of the prompt's keys and of the lane's own

`_partial_fwd_kernel` has two kinds of programs. Over the prompts, one program gathers the queries of all lanes of a
prompt through `members`, for one split of the prompt's keys. So the prompt's keys and values are read once for all its
lanes, by matrix products. Over the lanes, one program takes the queries of one lane that share a key head, and a split
of the lane's own keys. Both write a normalized partial output o_s and its log-sum-exp l_s (base 2, scale included).
One launch runs both kinds. Then `_merge_fwd_kernel` merges the partial outputs of a lane in fixed order.

A lane is one completion in flight. A slot is the memory for the keys and values of a lane or a prompt.

Shapes: R lanes, H query heads, K key heads with H % K == 0, P prompts of at most T tokens and at most G lanes each, C
tokens that a lane's slot holds, d width of a head. Partial outputs are fp32 [splits, R, H, d], those of the lanes' own
keys first; log-sum-exps are fp32 [splits, R, H], and -inf where a split holds no key.

Partial outputs are fp32: with bf16 the result would be rounded twice, with 1.41 times the error (emulated over 2 to 8
splits; 1.1 times is allowed). They are small: 3.5 KiB per lane and split at 14 heads of 64, compared with 512 KiB of
keys and values at a context of 1,024 tokens. The merge reads them from the L2 cache.
"""

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch
from fastgrpo.kernels.launch import LOG2E


@triton.jit
def _attend(q_ptr, q_lane_stride, q_head_stride, k_ptr, k_token_stride, v_ptr, v_token_stride, length, split, splits,
            lanes, heads, places, out_ptr, lse_ptr, scale2, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Attend with queries of one key head to one split of `length` keys, and store output and log-sum-exp.

    A row of the block is a pair of lane and query head; there are no rows of lane -1.
    """
    there = lanes >= 0
    depth = tl.arange(0, BLOCK_D)
    in_depth = depth < DEPTH
    q_ptrs = q_ptr + lanes.to(tl.int64)[:, None] * q_lane_stride + heads[:, None] * q_head_stride + depth[None, :]
    q = tl.load(q_ptrs, mask=there[:, None] & in_depth[None, :], other=0.0)
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    start = split * share
    end = tl.minimum(start + share, length)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        tokens = first + tl.arange(0, BLOCK_N)
        legal = tokens < end
        k_ptrs = k_ptr + tokens[None, :] * k_token_stride + depth[:, None]
        k = tl.load(k_ptrs, mask=legal[None, :] & in_depth[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale2
        scores = tl.where(legal[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2(top - new_top)
        e = tl.exp2(scores - new_top[:, None])
        v_ptrs = v_ptr + tokens[:, None] * v_token_stride + depth[None, :]
        v = tl.load(v_ptrs, mask=legal[:, None] & in_depth[None, :], other=0.0)
        total = total * shrink + tl.sum(e, axis=1)
        acc = tl.dot(e.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    tl.store(lse_ptr + places, top + tl.log2(total), mask=there)  # -inf where the split holds no key
    if start < end:
        out_ptrs = out_ptr + places[:, None] * DEPTH + depth[None, :]
        tl.store(out_ptrs, acc / total[:, None], mask=there[:, None] & in_depth[None, :])


@triton.jit
def _partial_fwd_kernel(q_ptr, q_lane_stride, q_head_stride, k_ptr, k_slot_stride, k_head_stride, k_token_stride, v_ptr,
                        v_slot_stride, v_head_stride, v_token_stride, length_ptr, pk_ptr, pk_slot_stride,
                        pk_head_stride, pk_token_stride, pv_ptr, pv_slot_stride, pv_head_stride, pv_token_stride,
                        prompt_length_ptr, member_ptr, out_ptr, lse_ptr, scale2, n_lanes, key_heads, prompts, group,
                        own_blocks, own_splits, prompt_blocks, prompt_splits, RATIO: tl.constexpr, DEPTH: tl.constexpr,
                        PRECISION: tl.constexpr, OWN_M: tl.constexpr, OWN_N: tl.constexpr, OWN_STAGES: tl.constexpr,
                        PROMPT_M: tl.constexpr, PROMPT_N: tl.constexpr, PROMPT_STAGES: tl.constexpr,
                        MEMBERS: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Attend to one split of a prompt's keys (the first programs, which take longest), or of a lane's own keys."""
    step = n_lanes * key_heads * RATIO  # places of one split
    of_prompts = prompts * prompt_blocks * key_heads * prompt_splits
    program = tl.program_id(0)
    if program < of_prompts:
        block, program = program % prompt_blocks, program // prompt_blocks
        key_head, program = program % key_heads, program // key_heads
        split, slot = program % prompt_splits, program // prompt_splits
        pairs = block * PROMPT_M + tl.arange(0, PROMPT_M)  # of lane and query head
        members = tl.load(member_ptr + slot * group + pairs // RATIO, mask=pairs < group * RATIO, other=-1)
        if tl.max(members) >= 0:
            its_heads = key_head * RATIO + pairs % RATIO
            its_places = (own_splits + split).to(tl.int64) * step + members * (key_heads * RATIO) + its_heads
            _attend(q_ptr, q_lane_stride, q_head_stride,
                    pk_ptr + slot.to(tl.int64) * pk_slot_stride + key_head.to(tl.int64) * pk_head_stride,
                    pk_token_stride,
                    pv_ptr + slot.to(tl.int64) * pv_slot_stride + key_head.to(tl.int64) * pv_head_stride,
                    pv_token_stride, tl.load(prompt_length_ptr + slot), split, prompt_splits, members, its_heads,
                    its_places, out_ptr, lse_ptr, scale2, DEPTH, PRECISION, PROMPT_M, PROMPT_N, BLOCK_D,
                    PROMPT_STAGES)  # fmt: skip
    else:
        program -= of_prompts
        block, program = program % own_blocks, program // own_blocks
        key_head, program = program % key_heads, program // key_heads
        split, slot = program % own_splits, program // own_splits
        rows = block * OWN_M + tl.arange(0, OWN_M)
        lanes = tl.where(rows < RATIO, slot, -1)
        heads = key_head * RATIO + rows % RATIO
        places = split.to(tl.int64) * step + lanes * (key_heads * RATIO) + heads
        if split == 0:  # the splits of a lane without a prompt, which no other program writes
            has_prompt = 0
            for first in range(0, prompts * group, MEMBERS):
                others = first + tl.arange(0, MEMBERS)
                others = tl.load(member_ptr + others, mask=others < prompts * group, other=-1)
                has_prompt = tl.maximum(has_prompt, tl.max((others == slot).to(tl.int32)))
            if has_prompt == 0:
                for i in range(own_splits, own_splits + prompt_splits):
                    tl.store(lse_ptr + places + i * step, float("-inf"), mask=rows < RATIO)
        _attend(q_ptr, q_lane_stride, q_head_stride,
                k_ptr + slot.to(tl.int64) * k_slot_stride + key_head.to(tl.int64) * k_head_stride, k_token_stride,
                v_ptr + slot.to(tl.int64) * v_slot_stride + key_head.to(tl.int64) * v_head_stride, v_token_stride,
                tl.load(length_ptr + slot), split, own_splits, lanes, heads, places, out_ptr, lse_ptr, scale2, DEPTH,
                PRECISION, OWN_M, OWN_N, BLOCK_D, OWN_STAGES)  # fmt: skip


@triton.jit
def _merge_fwd_kernel(part_ptr, lse_ptr, out_ptr, n_lanes, n_heads, splits, DEPTH: tl.constexpr, HEADS: tl.constexpr,
                      BLOCK_D: tl.constexpr):  # fmt: skip
    """Merge the splits of some heads of one lane; a lane without any key gets zeros."""
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    depth = tl.arange(0, BLOCK_D)
    there = heads < n_heads
    place = tl.program_id(0).to(tl.int64) * n_heads + heads
    step = n_lanes * n_heads
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    for split in range(splits):
        top = tl.maximum(top, tl.load(lse_ptr + place + split * step, mask=there, other=float("-inf")))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, BLOCK_D), tl.float32)
    for split in range(splits):
        places = place + split * step
        lse = tl.load(lse_ptr + places, mask=there, other=float("-inf"))
        weight = tl.exp2(lse - top)
        # An empty split wrote no partial output, so its memory must not be read.
        filled = (there & (lse != float("-inf")))[:, None] & (depth < DEPTH)[None, :]
        acc += weight[:, None] * tl.load(part_ptr + places[:, None] * DEPTH + depth[None, :], mask=filled, other=0.0)
        total += weight
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    mask = there[:, None] & (depth < DEPTH)[None, :]
    tl.store(out_ptr + place[:, None] * DEPTH + depth[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def _check(query: torch.Tensor, slots: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Raise ValueError unless the query and each of `slots` (name prefix -> keys, values, lengths) fit the kernel."""
    if query.device.type == "cpu" and not launch.INTERPRET:
        raise ValueError("group_decode needs CUDA tensors, got query on the CPU; use another attention provider")
    if query.dtype not in launch.DTYPES:
        raise ValueError(f"query must be bf16, fp16 or fp32, got {query.dtype}")
    if query.ndim != 3 or query.stride(-1) != 1:
        raise ValueError(f"query must be [R, H, d], contiguous in d, got {tuple(query.shape)}, {query.stride()}")
    _, heads, depth = query.shape
    for prefix, (keys, values, lengths) in slots.items():
        for name, tensor in ((f"{prefix}keys", keys), (f"{prefix}values", values)):
            fits = tensor.ndim == 4 and tensor.shape[-1] == depth and heads % tensor.shape[1] == 0
            if not fits or tensor.shape != keys.shape or tensor.stride(-1) != 1 or tensor.dtype != query.dtype:
                raise ValueError(
                    f"{name} must be {query.dtype} [slots, K, tokens, {depth}], contiguous in the last dimension, with "
                    f"K a divisor of {heads} heads and equal shapes of keys and values, got {tensor.dtype} "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()}"
                )
            assert tensor.shape[2] * tensor.stride(2) < 2**31, "offsets within a slot are 32-bit"
        if lengths.dtype != torch.int32 or lengths.stride(-1) != 1 or len(lengths) > len(keys):
            raise ValueError(
                f"{prefix}lengths must be int32, contiguous, and at most one per slot, got {lengths.dtype} "
                f"{tuple(lengths.shape)} for {len(keys)} slots"
            )


@launch.on_its_device
def group_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    prompt_keys: torch.Tensor,
    prompt_values: torch.Tensor,
    prompt_lengths: torch.Tensor,
    members: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Compute one decode step of attention: every lane attends to its prompt and to its own tokens.

    There is no sync, and the launches depend only on shapes, so that a CUDA graph can capture them. Only the last
    stride of each tensor must be 1.

    Args:
        query: [R, H, d] bf16, fp16 or fp32. Lane r owns slot r of `keys` and `values`.
        keys: [slots >= R, K, C, d] in the dtype of the query.
        values: As `keys`.
        lengths: [R] int32, the number of tokens of each lane, including the newest one.
        prompt_keys: [P, K, T, d] in the dtype of the query.
        prompt_values: As `prompt_keys`.
        prompt_lengths: [P] int32, the number of tokens of each prompt.
        members: [P, G] int32, the lanes of each prompt in any order, padded with -1. A lane belongs to at most one
            prompt. A lane without a prompt attends only to its own tokens. A prompt without lanes costs nothing.
        scale: Factor of the scores.

    Returns:
        [R, H, d] in the dtype of the query; zeros for a lane without any key.

    Raises:
        ValueError: A shape, dtype, stride or device differs from the above.
    """
    _check(query, {"": (keys, values, lengths), "prompt_": (prompt_keys, prompt_values, prompt_lengths)})
    (lanes, heads, depth), key_heads = query.shape, keys.shape[1]
    prompts = len(prompt_keys)
    if lengths.shape != (lanes,) or len(keys) < lanes:
        raise ValueError(
            f"lengths must be [{lanes}] and keys have {lanes} or more slots, got {tuple(lengths.shape)} and {len(keys)}"
        )
    if members.ndim != 2 or members.dtype != torch.int32 or len(members) != prompts or not members.is_contiguous():
        raise ValueError(f"members must be int32 [{prompts}, G], got {members.dtype} {tuple(members.shape)}")
    if prompt_lengths.shape != (prompts,) or prompt_keys.shape[1] != key_heads:
        raise ValueError(
            f"prompt_lengths must be [{prompts}] and prompt_keys have {key_heads} heads, got "
            f"{tuple(prompt_lengths.shape)} and {prompt_keys.shape[1]}"
        )
    ratio, group = heads // key_heads, members.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    own = launch.decode_blocks(ratio, depth, query.dtype)
    shared = launch.decode_blocks(group * ratio, depth, query.dtype)
    own_blocks, prompt_blocks = triton.cdiv(ratio, own.rows), triton.cdiv(group * ratio, shared.rows)
    own_splits = launch.decode_splits(lanes * own_blocks * key_heads, keys.shape[2], own, query.device)
    prompt_splits = launch.decode_splits(
        prompts * prompt_blocks * key_heads, prompt_keys.shape[2], shared, query.device
    )
    splits = own_splits + prompt_splits
    parts = torch.empty(splits, lanes, heads, depth, dtype=torch.float32, device=query.device)
    lses = torch.empty(splits, lanes, heads, dtype=torch.float32, device=query.device)
    if lanes:
        count = key_heads * (lanes * own_blocks * own_splits + prompts * prompt_blocks * prompt_splits)
        _partial_fwd_kernel[(count,)](
            query, *query.stride()[:2], keys, *keys.stride()[:3], values, *values.stride()[:3], lengths, prompt_keys,
            *prompt_keys.stride()[:3], prompt_values, *prompt_values.stride()[:3], prompt_lengths, members, parts, lses,
            scale * LOG2E.value, lanes, key_heads, prompts, group, own_blocks, own_splits, prompt_blocks, prompt_splits,
            RATIO=ratio, DEPTH=depth, PRECISION=launch.precision(query.dtype), OWN_M=own.rows, OWN_N=own.cols,
            OWN_STAGES=own.stages, PROMPT_M=shared.rows, PROMPT_N=shared.cols, PROMPT_STAGES=shared.stages,
            MEMBERS=launch.DECODE_MEMBERS, BLOCK_D=own.depth, **launch.options(max(own.warps, shared.warps)),
        )  # fmt: skip
        _merge_fwd_kernel[(lanes, triton.cdiv(heads, launch.MERGE_HEADS))](
            parts, lses, out, lanes, heads, splits, DEPTH=depth, HEADS=launch.MERGE_HEADS, BLOCK_D=own.depth,
            **launch.options(),
        )  # fmt: skip
    return out
