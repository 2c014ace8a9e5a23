"""Attention over packed sequences by kernels that want a batch of padded sequences.

The sequences are laid out in the buckets of `segments.py`. A bucket is computed by PyTorch's FlashAttention for CPUs,
or elsewhere by plain matrix products, some queries at a time. Neither keeps a score in memory beyond its call.

Shapes: N packed query tokens, M packed key tokens, S sequences of a bucket, T padded queries and U padded keys of each,
H query heads, K key heads, d head width.
"""

import torch

from fastgrpo.policy.segments import AttentionKernel, Segments

SCORES_AT_ONCE = 2**26  # scores that plain matrix products hold at once: 256 MiB in fp32


def lay_out(
    tensor: torch.Tensor, tokens: torch.Tensor, size: int, heads: int, zero: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy packed tokens to their places in a bucket, and repeat each key head for the query heads that share it.

    Args:
        tensor: [N, K, d] packed queries, keys or values.
        tokens: [S * T] int64. Index of the packed token at each place.
        size: S, the sequences of the bucket.
        heads: H, a multiple of K.
        zero: int64 places that are set to 0, or None.

    Returns:
        [S, H, T, d].
    """
    out = tensor.index_select(0, tokens)
    if zero is not None:
        out.index_fill_(0, zero, 0)
    out = out.unflatten(0, (size, -1)).transpose(1, 2)
    return out if tensor.shape[1] == heads else out.repeat_interleave(heads // tensor.shape[1], 1)


def collect(parts: list[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
    """Copy the results of all buckets back to the order of the packed tokens.

    Args:
        parts: The result of each bucket, [S, H, T, d].
        places: [N] int64. Place of each packed token among those of all buckets, one after another.

    Returns:
        [N, H, d].
    """
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, places)


def _wide(*tensors):
    """Cast 16-bit tensors to fp32; fp32 and fp64 stay."""
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


class PaddedAttention(AttentionKernel):
    """Lays the sequences out in buckets and calls a kernel of padded sequences on each bucket.

    16-bit tensors are computed in fp32. PyTorch's FlashAttention for CPUs takes two to three times as long for bf16
    where the CPU has no AMX, and plain products would round the scores.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._forward, self._backward = KERNELS[name]

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, (query, key, value) = query.dtype, _wide(query, key, value)
        heads, outs, lses = query.shape[1], [], []
        for bucket in segments.buckets:
            q = lay_out(query, bucket.queries, bucket.size, heads)
            k, v = (lay_out(tensor, bucket.keys, bucket.size, heads) for tensor in (key, value))
            out, lse = self._forward(q, k, v, bucket.bias_in(q.dtype), segments.causal, scale)
            outs.append(out)
            lses.append(lse[..., None])
        places = segments.buckets.place_q
        return collect(outs, places).to(dtype), collect(lses, places)[..., 0].T.contiguous()

    def backward(self, grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 out: torch.Tensor, lse: torch.Tensor, segments: Segments,
                 scale: float) -> tuple[torch.Tensor, ...]:  # fmt: skip
        dtype, (grad, query, key, value, out) = query.dtype, _wide(grad, query, key, value, out)
        heads, gradients = query.shape[1], ([], [], [])
        for bucket in segments.buckets:
            dout = lay_out(grad, bucket.queries, bucket.size, heads, zero=bucket.unused)
            q, o = (lay_out(tensor, bucket.queries, bucket.size, heads) for tensor in (query, out))
            k, v = (lay_out(tensor, bucket.keys, bucket.size, heads) for tensor in (key, value))
            log_sum = lay_out(lse.T[..., None], bucket.queries, bucket.size, heads)[..., 0]
            dq, dk, dv = self._backward(dout, q, k, v, o, log_sum, bucket.bias_in(q.dtype), segments.causal, scale)
            gradients[0].append(dq)
            for tensor, of_heads in ((gradients[1], dk), (gradients[2], dv)):
                tensor.append(of_heads.unflatten(1, (key.shape[1], -1)).sum(2) if heads > key.shape[1] else of_heads)
        places = segments.buckets
        packed = map(collect, gradients, (places.place_q, places.place_k, places.place_k))
        return tuple(gradient.to(dtype) for gradient in packed)


# The kernels of a bucket, in fp32 or fp64. Shapes: q, out and dout [S, H, T, d], k and v [S, H, U, d], lse [S, H, T],
# bias [S, 1, 1, U] or None. The backward passes take out and lse of the whole softmax and return the gradients of q, k
# and v.


def _cpu_forward(q, k, v, bias, causal, scale):
    """Return out and lse, by PyTorch's FlashAttention for CPUs."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def _cpu_backward(dout, q, k, v, out, lse, bias, causal, scale):
    """Return the gradients, by PyTorch's FlashAttention for CPUs."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def _blocks(q, k):
    """Split the queries into slices whose scores are few enough to be held at once."""
    step = max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, start + step) for start in range(0, q.shape[2], step)]


def _scores(q, k, block, bias, causal, scale):
    """Return the scores of a block of the queries to all U keys, -inf where a key is hidden from a query."""
    scores = q[:, :, block].mul(scale) @ k.transpose(-1, -2)
    if bias is not None:
        scores += bias
    if causal:
        index = torch.arange(k.shape[2], device=k.device)
        scores.masked_fill_(index > index[block, None], -torch.inf)
    return scores


def _math_forward(q, k, v, bias, causal, scale):
    """Return out and lse, by matrix products."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for block in _blocks(q, k):
        scores = _scores(q, k, block, bias, causal, scale)
        lse[:, :, block] = scores.logsumexp(-1)
        out[:, :, block] = scores.softmax(-1) @ v
    return out, lse


def _math_backward(dout, q, k, v, out, lse, bias, causal, scale):
    """Return the gradients by the formulas of varlen.py, as matrix products."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    mean = (dout * out).sum(-1, keepdim=True)  # D
    for block in _blocks(q, k):
        probs = (_scores(q, k, block, bias, causal, scale) - lse[:, :, block, None]).exp_()
        dv += probs.transpose(-1, -2) @ dout[:, :, block]
        dscores = probs.mul_(dout[:, :, block] @ v.transpose(-1, -2) - mean[:, :, block])
        dq[:, :, block] = dscores @ k * scale
        dk += dscores.transpose(-1, -2) @ q[:, :, block] * scale
    return dq, dk, dv


KERNELS = {"cpu": (_cpu_forward, _cpu_backward), "math": (_math_forward, _math_backward)}
