"""Attention kernels that know no packing, given packed sequences: laid out by sequence, padded within buckets.

Sequences of similar length share a bucket, so that what padding costs stays small: many short sequences are one call,
and long ones stand nearly alone. The kernels of a bucket are PyTorch's FlashAttention for CPUs, and plain matrix
products elsewhere, a few query rows at a time; neither keeps a score in memory beyond its call.

Shapes: S sequences of a bucket, T query places, U key places, H query heads, K key heads, d head width.
"""

from dataclasses import dataclass

import torch

WASTE = 1.25  # of the scores of a bucket: computed ones to those that count,
SPARE = 2**17  # above this many, under which another bucket costs more than the padding
SCORES_AT_ONCE = 2**26  # of plain matrix products: 256 MiB in fp32


@dataclass(frozen=True)
class Bucket:
    """queries [S * T], keys [S * U]: the packed row at each place, a repeated one where there is none. unused: the
    places of queries that are padding, or None. bias: fp32 [S, 1, 1, U], -inf at keys that are padding, or None."""

    size: int
    queries: torch.Tensor
    keys: torch.Tensor
    unused: torch.Tensor | None
    bias: torch.Tensor | None

    def bias_in(self, dtype):
        return None if self.bias is None else self.bias.to(dtype)


class Buckets:
    """How packed sequences are laid out; `place_q` [N] and `place_k` [M]: where among all buckets' places a row is."""

    def __init__(self, queries, keys, device, causal):
        """queries, keys: rows of each sequence, on the host. causal: no query in use sees a key behind the end."""
        queries, keys = torch.tensor(queries), torch.tensor(keys)
        self.place_q = torch.empty(int(queries.sum()), dtype=torch.int64)
        self.place_k = torch.empty(int(keys.sum()), dtype=torch.int64)
        starts_q, starts_k = queries.cumsum(0) - queries, keys.cumsum(0) - keys
        self.buckets, base_q, base_k = [], 0, 0
        for chosen in self._similar(queries.tolist(), keys.tolist()):
            rows_q, used_q = self._grid(starts_q[chosen], queries[chosen])
            rows_k, used_k = self._grid(starts_k[chosen], keys[chosen])
            self.place_q[rows_q[used_q]] = used_q.flatten().nonzero()[:, 0] + base_q
            self.place_k[rows_k[used_k]] = used_k.flatten().nonzero()[:, 0] + base_k
            base_q, base_k = base_q + rows_q.numel(), base_k + rows_k.numel()
            unused = None if used_q.all() else (~used_q).flatten().nonzero()[:, 0].to(device)
            bias = None
            if not causal and not used_k.all():
                bias = torch.zeros(used_k.shape).masked_fill_(~used_k, -torch.inf)[:, None, None].to(device)
            bucket = Bucket(len(chosen), rows_q.flatten().to(device), rows_k.flatten().to(device), unused, bias)
            self.buckets.append(bucket)
        self.place_q, self.place_k = self.place_q.to(device), self.place_k.to(device)

    @staticmethod
    def _similar(queries, keys):
        """Sequence numbers by bucket."""
        buckets, width, height, scores = [], 0, 0, 0
        for i in sorted(range(len(queries)), key=lambda i: (keys[i], queries[i])):
            width, height, scores = max(width, queries[i]), max(height, keys[i]), scores + queries[i] * keys[i]
            if not buckets or (len(buckets[-1]) + 1) * width * height > WASTE * scores + SPARE:
                buckets.append([])
                width, height, scores = queries[i], keys[i], queries[i] * keys[i]
            buckets[-1].append(i)
        return [torch.tensor(sorted(bucket)) for bucket in buckets]

    @staticmethod
    def _grid(starts, lengths):
        """-> the packed row of every place, whether it is used: [S, longest]."""
        offsets = torch.arange(int(lengths.max()))
        return starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1), offsets < lengths[:, None]

    def __iter__(self):
        return iter(self.buckets)


def lay_out(tensor, rows, size, heads, zero=None):
    """[N, K, d] -> [S, heads, T, d]: rows at their places, and each key head as often as query heads share it.

    zero: places to be 0.
    """
    out = tensor.index_select(0, rows)
    if zero is not None:
        out.index_fill_(0, zero, 0)
    out = out.unflatten(0, (size, -1)).transpose(1, 2)
    return out if tensor.shape[1] == heads else out.repeat_interleave(heads // tensor.shape[1], 1)


def collect(parts, places):
    """Of every bucket [S, H, T, d] -> [N, H, d]."""
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, places)


class PaddedAttention:
    """The interface of the kernels in varlen.py over a kernel of padded sequences, "cpu" or "math"."""

    def __init__(self, name):
        self.name = name
        self._forward, self._backward = KERNELS[name]

    def forward(self, query, key, value, segments, scale):
        """query [N, H, d], key and value [M, K, d] -> out [N, H, d], lse [H, N] in fp32 (fp64 from fp64)."""
        heads, outs, lses = query.shape[1], [], []
        for bucket in segments.buckets:
            q = lay_out(query, bucket.queries, bucket.size, heads)
            k, v = (lay_out(tensor, bucket.keys, bucket.size, heads) for tensor in (key, value))
            out, lse = self._forward(q, k, v, bucket.bias_in(q.dtype), segments.causal, scale)
            outs.append(out)
            lses.append(lse[..., None])
        places = segments.buckets.place_q
        return collect(outs, places), collect(lses, places)[..., 0].T.contiguous()

    def backward(self, grad, query, key, value, out, lse, segments, scale):
        """grad and out [N, H, d], lse [H, N] -> dq, dk, dv."""
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
        return tuple(map(collect, gradients, (places.place_q, places.place_k, places.place_k)))


def cpu_forward(q, k, v, bias, causal, scale):
    """q [S, H, T, d], k and v [S, H, U, d] -> out, lse [S, H, T]."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def cpu_backward(dout, q, k, v, out, lse, bias, causal, scale):
    """dout and out [S, H, T, d], lse [S, H, T] of the whole softmax -> dq, dk, dv."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def _blocks(q, k):
    """Slices of query places whose scores fit into memory."""
    step = max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, start + step) for start in range(0, q.shape[2], step)]


def _scores(q, k, rows, bias, causal, scale):
    scores = q[:, :, rows].mul(scale) @ k.transpose(-1, -2)
    if bias is not None:
        scores += bias
    if causal:
        places = torch.arange(k.shape[2], device=k.device)
        scores.masked_fill_(places > places[rows, None], -torch.inf)
    return scores


def _wide(*tensors):
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


def math_forward(q, k, v, bias, causal, scale):
    """As `cpu_forward`, by matrix products in fp32 (fp64 from fp64)."""
    dtype, (q, k, v) = q.dtype, _wide(q, k, v)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for rows in _blocks(q, k):
        scores = _scores(q, k, rows, bias, causal, scale)
        lse[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = scores.softmax(-1) @ v
    return out.to(dtype), lse


def math_backward(dout, q, k, v, out, lse, bias, causal, scale):
    """The formulas of varlen.py."""
    dtype, (dout, q, k, v, out) = q.dtype, _wide(dout, q, k, v, out)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    mean = (dout * out).sum(-1, keepdim=True)
    for rows in _blocks(q, k):
        probs = (_scores(q, k, rows, bias, causal, scale) - lse[:, :, rows, None]).exp_()
        dv += probs.transpose(-1, -2) @ dout[:, :, rows]
        dscores = probs.mul_(dout[:, :, rows] @ v.transpose(-1, -2) - mean[:, :, rows])
        dq[:, :, rows] = dscores @ k * scale
        dk += dscores.transpose(-1, -2) @ q[:, :, rows] * scale
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


KERNELS = {"cpu": (cpu_forward, cpu_backward), "math": (math_forward, math_backward)}
