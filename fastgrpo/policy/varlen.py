"""Attention over packed sequences, forward and backward, with the fastest installed kernel.

The softmax over two sets of keys a and b is exactly the merge of two attentions by their log-sum-exps:

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The backward pass over either set needs only the merged output and log-sum-exp, as in ring attention
(arXiv 2310.01889). With P = exp(scale q k^T - lse) and D = sum(dout * out),

    dv = P^T dout        dS = P * (dout v^T - D)        dq = scale dS k        dk = scale dS^T q

So every `AttentionKernel` returns its log-sum-exp, and its backward pass takes the output and the log-sum-exp of the
whole softmax.

On GPUs, FlashAttention (PyTorch's, or a package of `FLASH`) reads packed tokens. Otherwise sequences of similar length
share a bucket, padded to its longest (`PaddedAttention`). PyTorch's FlashAttention for CPUs, or plain matrix products
for some queries at a time, compute a bucket.

Shapes: N packed query tokens, M packed key tokens, S sequences, H query heads, K key heads (H is a multiple of K),
d head width. In a bucket, S counts only its sequences, with T padded queries and U padded keys each. A "place" is one
of the S * T (or S * U) padded tokens of a bucket.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn import attention as torch_attention

from fastgrpo.kernels.objectives import first_order
from fastgrpo.loss.inputs import to_device
from fastgrpo.policy.device import package_obstacle

logger = logging.getLogger(__name__)

WASTE = 1.25  # maximum ratio of computed scores to needed scores in a bucket,
SPARE = 2**17  # plus this many scores, which cost about as much as another bucket


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to the longest one. A padded place repeats the sequence's last token."""

    size: int  # S, the number of sequences
    queries: torch.Tensor  # [S * T] int64: index of the packed query at each place
    keys: torch.Tensor  # [S * U] int64: index of the packed key at each place
    unused: torch.Tensor | None  # int64 places of padded queries; None if there are none
    bias: torch.Tensor | None  # [S, 1, 1, U] fp32, -inf at padded keys, else 0; None if no query attends to padding

    def bias_in(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Cast the bias to the dtype of the queries."""
        return None if self.bias is None else self.bias.to(dtype)


class Buckets:
    """The layout of packed sequences in buckets of similar length.

    `place_q` [N] and `place_k` [M] are the places of the packed queries and keys in the concatenated buckets.
    """

    def __init__(self, queries: list[int], keys: list[int], device: torch.device | str, causal: bool) -> None:
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
            unused = None if used_q.all() else to_device((~used_q).flatten().nonzero()[:, 0], device)
            bias = None
            if not causal and not used_k.all():
                bias = torch.zeros(used_k.shape).masked_fill_(~used_k, -torch.inf)[:, None, None]
                bias = to_device(bias, device)
            places = (to_device(rows.flatten(), device) for rows in (rows_q, rows_k))
            self.buckets.append(Bucket(len(chosen), *places, unused, bias))
        self.place_q, self.place_k = to_device(self.place_q, device), to_device(self.place_k, device)

    @staticmethod
    def _similar(queries, keys):
        """Sort the sequences into buckets, and return the indices of each bucket's sequences."""
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
        """Return the index of the packed token at every place and whether the place is used, both [S, longest]."""
        offsets = torch.arange(int(lengths.max()))
        return starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1), offsets < lengths[:, None]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)


class Segments:
    """S sequences of packed queries, and the packed keys that each sequence attends to."""

    def __init__(
        self,
        queries: list[int],
        keys: list[int],
        device: torch.device | str,
        *,
        causal: bool,
        query_span: slice = slice(None),
        key_span: slice = slice(None),
    ) -> None:
        assert len(queries) == len(keys) and min(queries) > 0 and min(keys) > 0
        assert not causal or queries == keys
        self.queries, self.keys, self.device, self.causal = queries, keys, device, causal
        self.query_span, self.key_span = query_span, key_span
        self.max_q, self.max_k = max(queries), max(keys)

    def _bounds(self, lengths):
        return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), self.device)

    @cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        """The start of each sequence's queries and the end of the last: [S+1] int32 on the device."""
        return self._bounds(self.queries)

    @cached_property
    def cu_seqlens_k(self) -> torch.Tensor:
        """The start of each sequence's keys and the end of the last: [S+1] int32 on the device."""
        return self.cu_seqlens_q if self.causal else self._bounds(self.keys)

    @cached_property
    def buckets(self) -> Buckets:
        """The layout in buckets, for kernels that do not support packed tokens."""
        return Buckets(self.queries, self.keys, self.device, self.causal)


class AttentionKernel(ABC):
    """Computes attention over packed sequences. `name` is its name in the log."""

    name: str

    @abstractmethod
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend within the sequences, with query [N, H, d], key and value [M, K, d].

        Returns the output [N, H, d] in the dtype of the query, and the log-sum-exp of the scores [H, N] in fp32 (fp64
        for fp64 queries).
        """

    @abstractmethod
    def backward(self, grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 out: torch.Tensor, lse: torch.Tensor, segments: Segments,
                 scale: float) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Compute the gradients of query, key and value through these keys, by the module's formulas.

        `out` [N, H, d] and `lse` [H, N] belong to the whole softmax, over these keys and all others.
        """


SCORES_AT_ONCE = 2**26  # maximum scores in memory with plain matrix products: 256 MiB in fp32


def lay_out(
    tensor: torch.Tensor, tokens: torch.Tensor, size: int, heads: int, zero: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy packed tokens [N, K, d] to their places in a bucket, and return [S, H, T, d].

    Each key head is repeated for the query heads that share it. The places `zero` are set to 0.
    """
    out = tensor.index_select(0, tokens)
    if zero is not None:
        out.index_fill_(0, zero, 0)
    out = out.unflatten(0, (size, -1)).transpose(1, 2)
    return out if tensor.shape[1] == heads else out.repeat_interleave(heads // tensor.shape[1], 1)


def collect(parts: list[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
    """Copy the results of all buckets, [S, H, T, d] each, back to the order of the packed tokens: [N, H, d]."""
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, places)


def _wide(*tensors):
    """Cast 16-bit tensors to fp32."""
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


class PaddedAttention(AttentionKernel):
    """Lays sequences out in buckets, and calls a kernel for padded sequences on each bucket.

    16-bit tensors are computed in fp32. PyTorch's FlashAttention for CPUs takes two to three times as long for bf16 on
    CPUs without AMX, and plain products would round the scores.
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
# bias [S, 1, 1, U] or None. The backward passes take out and lse of the whole softmax, and return dq, dk and dv.


def _cpu_forward(q, k, v, bias, causal, scale):
    """Return out and lse with PyTorch's FlashAttention for CPUs."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def _cpu_backward(dout, q, k, v, out, lse, bias, causal, scale):
    """Return the gradients with PyTorch's FlashAttention for CPUs."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def _blocks(q, k):
    """Split the queries into slices of at most `SCORES_AT_ONCE` scores."""
    step = max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, start + step) for start in range(0, q.shape[2], step)]


def _scores(q, k, block, bias, causal, scale):
    """Return the scores of a block of queries and all U keys, -inf where masked."""
    scores = q[:, :, block].mul(scale) @ k.transpose(-1, -2)
    if bias is not None:
        scores += bias
    if causal:
        index = torch.arange(k.shape[2], device=k.device)
        scores.masked_fill_(index > index[block, None], -torch.inf)
    return scores


def _math_forward(q, k, v, bias, causal, scale):
    """Return out and lse with matrix products."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for block in _blocks(q, k):
        scores = _scores(q, k, block, bias, causal, scale)
        lse[:, :, block] = scores.logsumexp(-1)
        out[:, :, block] = scores.softmax(-1) @ v
    return out, lse


def _math_backward(dout, q, k, v, out, lse, bias, causal, scale):
    """Return the gradients with matrix products, by the module's formulas."""
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


FLASH_ATTN = "flash_attn.flash_attn_interface"  # the module of flash-attn with the functions used here
HALF = (torch.float16, torch.bfloat16)


class VarlenAttention(torch.autograd.Function):
    """Attention of packed queries [N, H, d] over the keys [M, K, d] of one or more parts, as one softmax.

    The first part covers all queries. Each further part adds keys for some of them.
    """

    @staticmethod
    def forward(ctx, query, key, value, parts, scale):
        kernel = kernel_for(query)
        out, lse = kernel.forward(query, key, value, parts[0], scale)
        for part in parts[1:]:
            more, more_lse = kernel.forward(*part_of(part, query, key, value), part, scale)
            merge_(out[part.query_span], lse[:, part.query_span], more, more_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernel, ctx.parts, ctx.scale = kernel, parts, scale
        return out

    @staticmethod
    @first_order("packed attention")
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        first, *others = ctx.parts
        dq, dk, dv = ctx.kernel.backward(grad, query, key, value, out, lse, first, ctx.scale)
        for part in others:
            span, key_span = part.query_span, part.key_span
            inputs = (grad[span], *part_of(part, query, key, value), out[span], lse[:, span].contiguous())
            more_q, more_k, more_v = ctx.kernel.backward(*inputs, part, ctx.scale)
            dq[span] += more_q
            dk[key_span] += more_k
            dv[key_span] += more_v
        return dq, dk, dv, None, None


def part_of(
    part: Segments, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select the queries, keys and values of one part."""
    return query[part.query_span], key[part.key_span], value[part.key_span]


def merge_(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Merge two attentions of the same queries over different keys, in place into the first."""
    share = torch.sigmoid(more_lse - lse).T[..., None]  # exp(more_lse - merged)
    out.copy_(torch.lerp(out.to(lse.dtype), more.to(lse.dtype), share))
    lse.copy_(torch.logaddexp(lse, more_lse))


class FlashAttn(AttentionKernel):
    """The kernels of flash-attn 2, for half precision on GPUs of compute capability 8.0 and newer."""

    name = "flash-attn 2"

    @staticmethod
    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        return _flash_attn_varlen_forward(
            query, key, value, segments.cu_seqlens_q, segments.cu_seqlens_k, segments.max_q, segments.max_k,
            dropout_p=0.0, softmax_scale=scale, causal=segments.causal,
        )[:2]  # fmt: skip

    @staticmethod
    def backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
                 lse: torch.Tensor, segments: Segments, scale: float) -> tuple[torch.Tensor, ...]:  # fmt: skip
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        gradients = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
        _flash_attn_varlen_backward(
            grad, query, key, value, out, lse, *gradients, segments.cu_seqlens_q, segments.cu_seqlens_k,
            segments.max_q, segments.max_k, dropout_p=0.0, softmax_scale=scale, causal=segments.causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return gradients


class TorchFlash(AttentionKernel):
    """PyTorch's built-in FlashAttention, for the same GPUs, or the kernels that are activated in its place.

    It calls the operators behind `torch.nn.attention.varlen`, because the public function has no backward pass for a
    merged softmax.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @staticmethod
    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.aten._flash_attention_forward(
            query, key, value, segments.cu_seqlens_q, segments.cu_seqlens_k, segments.max_q, segments.max_k,
            0.0, segments.causal, False, scale=scale,
        )[:2]  # fmt: skip

    @staticmethod
    def backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
                 lse: torch.Tensor, segments: Segments, scale: float) -> tuple[torch.Tensor, ...]:  # fmt: skip
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)  # random state that is never read
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse, segments.cu_seqlens_q, segments.cu_seqlens_k, segments.max_q,
            segments.max_k, 0.0, segments.causal, no_dropout, no_dropout, scale=scale,
        )  # fmt: skip


class Flash(NamedTuple):
    """A package of FlashAttention, and which GPUs (major compute capabilities) and heads it supports."""

    module: str
    majors: tuple[int, ...]
    width: int


# The values of the setting `attention`, in the order in which auto tries them. The last one is PyTorch's.
FLASH = {
    "fa4": Flash("flash_attn.cute.interface", (9, 10), 128),
    "fa3": Flash("flash_attn_interface", (9,), 256),
    "fa2": Flash(FLASH_ATTN, (8, 9, 10, 11, 12), 256),
}
ALLOWED = 2e-2  # relative error of 16-bit outputs and gradients in the check of a package
_asked = "auto"


def use_attention(name: str, device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Set the kernel of all later packed attention in this process, or raise if it does not support these tensors."""
    global _asked
    obstacle = _obstacle(name, device, dtype, width) if name in FLASH else None
    if obstacle:
        raise ValueError(f"attention={name!r} {obstacle}; use attention='auto', which chooses what works here")
    if name != _asked:
        _choose.cache_clear()
        _deactivate()
    _asked = name


def kernel_for(query: torch.Tensor) -> AttentionKernel | type[AttentionKernel]:
    """Choose the kernel for queries of this device, dtype and head width, and log the choice once."""
    return _choose(_asked, query.device, query.dtype, query.shape[-1])


@cache
def _choose(asked, device, dtype, width):
    for name in FLASH:
        if asked in ("auto", name) and _obstacle(name, device, dtype, width) is None:
            kernel = _activated(name)
            if _sound(kernel, device, dtype, width, asked):
                break
            _deactivate()
    else:
        flash = _unfit(device, dtype, width) is None and torch.backends.cuda.is_flash_attention_available()
        kernel = TorchFlash("torch") if flash else PaddedAttention("cpu" if device.type == "cpu" else "math")
    logger.info("packed attention: %s for %s on %s, head width %d", kernel.name, dtype, device, width)
    return kernel


def _activated(name):
    """Return the kernels of a package. Activating fa3 or fa4 changes all attention of PyTorch in this process."""
    if name == "fa2":
        return FlashAttn
    torch_attention.activate_flash_attention_impl(name.upper())
    return TorchFlash(f"flash-attn {name[-1]}")


def _deactivate():
    if torch_attention.current_flash_attention_impl():
        torch_attention.restore_flash_attention_impl()


def _unfit(device, dtype, width, most=256):
    """Return why FlashAttention does not support tensors, as a predicate ("needs ..."), or None."""
    if device.type != "cuda":
        return f"needs a CUDA device; the model is on {device}"
    if dtype not in HALF:
        return f"supports bf16 and fp16; the model is {dtype}"
    if width > most or width % 8:
        return f"supports head widths that are multiples of 8 and at most {most}; the model has {width}"
    return None if torch.cuda.get_device_capability(device)[0] >= 8 else "needs compute capability 8.0 or newer"


def _obstacle(name, device, dtype, width):
    """Return why a package of `FLASH` cannot be used, as a predicate, or None."""
    flash = FLASH[name]
    unfit = _unfit(device, dtype, width, flash.width)
    if unfit:
        return unfit
    major, minor = torch.cuda.get_device_capability(device)
    if major not in flash.majors:
        return f"supports compute capabilities {', '.join(f'{m}.x' for m in flash.majors)}; the GPU has {major}.{minor}"
    if name != "fa2" and name.upper() not in torch_attention.list_flash_attention_impls():
        return f"is unknown to torch {torch.__version__}; upgrade torch"
    return package_obstacle(flash.module)


def _sound(kernel, device, dtype, width, asked):
    """Check a kernel of a package once, as the Triton kernels are checked."""
    from fastgrpo.loss.dispatch import trusted

    remedy = None if asked == "auto" else "Use attention='auto' to continue without it."
    variant = {"dtype": dtype, "head width": width}
    return trusted(kernel.name, device, variant, lambda: _difference(kernel, device, dtype, width), remedy)


def _difference(kernel, device, dtype, width):
    """Compare a kernel with matrix products in fp32, forward and backward. Return what differs, or None."""
    generator = torch.Generator(device).manual_seed(0)  # draws of the run do not change
    for causal, keys in ((True, [200, 77]), (False, [77, 200])):
        segments = Segments([200, 77], keys, device, causal=causal)
        shapes = [(277, heads, width) for heads in (4, 4, 2, 2)]
        grad, *tensors = (torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes)
        results = []
        for way, of in ((kernel, tensors), (PaddedAttention("math"), [tensor.float() for tensor in tensors])):
            out, lse = way.forward(*of, segments, width**-0.5)
            gradients = way.backward(grad.to(out.dtype), *of, out, lse, segments, width**-0.5)
            results.append(dict(zip(("output", "log-sum-exp", "dq", "dk", "dv"), (out, lse, *gradients), strict=True)))
        for name, truth in results[1].items():
            error = ((results[0][name].float() - truth).norm() / truth.norm()).item()
            if not error <= ALLOWED:
                return f"{name} differs by {error:.3g} of its norm ({ALLOWED} is allowed)"
    return None
