"""Functions that compute one part of attention: the queries of several slots against the first keys of each slot.

A part attends without a causal mask and returns the log-sum-exp of its scores, so that `SharedPrefix` (providers.py)
can merge the part over a prompt with the part over a lane's own tokens.

Shapes: S slots with Q queries and L keys each, H query heads, K key heads (H is a multiple of K), d head width.
"""

import torch


def products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a part of `SharedPrefix` by plain matrix products, on any device.

    Args:
        query: [S, Q, H, d].
        keys: [S, K, L, d].
        values: [S, K, L, d].
        lengths: [S] int32. How many keys of each slot count, at least one. Or [S, Q], how many count for each query.
        scale: Factor on the scores before the softmax.

    Returns:
        The output [S, Q, H, d] and the log-sum-exp of the scores [S, H, Q].
    """
    slots, queries, heads, width = query.shape
    kv_heads, padded = keys.shape[1], True
    if keys.device.type == "cpu":
        shortest, longest = (int(bound) for bound in lengths.aminmax())
        keys, values = keys[:, :, :longest], values[:, :, :longest]
        padded = shortest < longest
    grouped = query.transpose(1, 2).reshape(slots, kv_heads, -1, width)  # the query heads that share a key head
    scores = (grouped * scale) @ keys.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if padded:
        beyond = torch.arange(keys.shape[2], device=keys.device) >= lengths.view(slots, 1, -1, 1)
        scores.view(slots, heads, queries, -1).masked_fill_(beyond, -torch.inf)
    probs = scores.softmax(-1)
    lse = scores.amax(-1) - probs.amax(-1).log_()  # the largest probability is exp(largest score - lse)
    out = (probs.to(values.dtype) @ values).view(slots, heads, queries, -1).transpose(1, 2)
    return out, lse.view(slots, heads, queries)


def flash_attn(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a part of `SharedPrefix` by flash-attn 2.

    Args:
        query: [S, Q, H, d] bf16 or fp16.
        keys: [S, K, L, d].
        values: [S, K, L, d].
        lengths: [S] int32. How many keys of each slot count, at least one.
        scale: Factor on the scores before the softmax.

    Returns:
        The output [S, Q, H, d] and the log-sum-exp of the scores [S, H, Q] fp32.
    """
    from flash_attn import flash_attn_with_kvcache

    out, lse = flash_attn_with_kvcache(
        query, keys.transpose(1, 2), values.transpose(1, 2), cache_seqlens=lengths, softmax_scale=scale,
        return_softmax_lse=True,
    )  # fmt: skip
    return out, lse


def varlen(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a part of `SharedPrefix` by PyTorch's built-in FlashAttention.

    Its argument `seqused_k` tells how many keys of a slot count, so that the slots need no pages.

    Args:
        query: [S, Q, H, d] bf16 or fp16.
        keys: [S, K, L, d].
        values: [S, K, L, d].
        lengths: [S] int32. How many keys of each slot count, at least one.
        scale: Factor on the scores before the softmax.

    Returns:
        The output [S, Q, H, d] and the log-sum-exp of the scores [S, H, Q] fp32.
    """
    slots, queries, heads, _ = query.shape
    capacity = keys.shape[2]
    starts = torch.arange(slots + 1, dtype=torch.int32, device=query.device)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query.flatten(0, 1), keys.transpose(1, 2).flatten(0, 1), values.transpose(1, 2).flatten(0, 1),
        starts * queries, starts * capacity, queries, capacity, 0.0, False, False, scale=scale, seqused_k=lengths,
    )  # fmt: skip
    return out.view(slots, queries, heads, -1), lse.reshape(heads, slots, queries).transpose(0, 1)
