"""Attention over sequences packed side by side, by the kernels there are, forward and backward.

A softmax over two sets of keys is exactly the merge of two attentions, a and b, by their log-sum-exps:

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

and the backward of either needs nothing of the other but what was merged, as in ring attention
(https://arxiv.org/abs/2310.01889): with P = exp(scale q k^T - lse) and D = sum(dout * out),

    dv = P^T dout        dS = P * (dout v^T - D)        dq = scale dS k        dk = scale dS^T q

So every kernel here returns its log-sum-exp, and its backward takes output and log-sum-exp of the whole softmax.

Shapes: N query rows, M key rows, H query heads, K key heads (H a multiple of K), d head width, S sequences.
"""

import logging
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import accumulate

import torch
from torch.autograd.function import once_differentiable

from fastgrpo.policy.padded import Buckets, PaddedAttention

logger = logging.getLogger(__name__)

HALF = (torch.float16, torch.bfloat16)


class Segments:
    """S sequences of query rows, and the key rows that each attends to.

    queries, keys: how many of each a sequence has, on the host, none 0. causal: row i of a sequence sees its keys up to
    i. rows, key_rows: where among all packed rows these queries and keys stand, side by side.
    """

    def __init__(self, queries, keys, device, *, causal, rows=slice(None), key_rows=slice(None)):
        assert len(queries) == len(keys) and min(queries) > 0 and min(keys) > 0
        assert not causal or queries == keys
        self.queries, self.keys, self.device, self.causal = queries, keys, device, causal
        self.rows, self.key_rows = rows, key_rows
        self.max_q, self.max_k = max(queries), max(keys)

    def _bounds(self, lengths):
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(self.device, non_blocking=True)

    @cached_property
    def cu_seqlens_q(self):
        """[S+1] int32 on the device."""
        return self._bounds(self.queries)

    @cached_property
    def cu_seqlens_k(self):
        return self.cu_seqlens_q if self.causal else self._bounds(self.keys)

    @cached_property
    def buckets(self):
        """How kernels without packing lay them out."""
        return Buckets(self.queries, self.keys, self.device, self.causal)


class VarlenAttention(torch.autograd.Function):
    """query [N, H, d], key and value [M, K, d], the `Segments` of the parts -> [N, H, d].

    The first part covers all rows; every further one adds keys to some of them.
    """

    @staticmethod
    def forward(ctx, query, key, value, parts, scale):
        kernel = kernel_for(query)
        out, lse = kernel.forward(query, key, value, parts[0], scale)
        for part in parts[1:]:
            more, more_lse = kernel.forward(*part_of(part, query, key, value), part, scale)
            merge_(out[part.rows], lse[:, part.rows], more, more_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernel, ctx.parts, ctx.scale = kernel, parts, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        first, *others = ctx.parts
        dq, dk, dv = ctx.kernel.backward(grad, query, key, value, out, lse, first, ctx.scale)
        for part in others:
            rows, key_rows = part.rows, part.key_rows
            inputs = (grad[rows], *part_of(part, query, key, value), out[rows], lse[:, rows].contiguous())
            more_q, more_k, more_v = ctx.kernel.backward(*inputs, part, ctx.scale)
            dq[rows] += more_q
            dk[key_rows] += more_k
            dv[key_rows] += more_v
        return dq, dk, dv, None, None


def part_of(part, query, key, value):
    """The rows that a part is about."""
    return query[part.rows], key[part.key_rows], value[part.key_rows]


def merge_(out, lse, more, more_lse):
    """Two attentions of the same queries over different keys into one, in place of the first.

    out, more: [N, H, d]. lse, more_lse: [H, N].
    """
    share = torch.sigmoid(more_lse - lse).T[..., None]  # exp(more_lse - merged)
    out.copy_(torch.lerp(out.to(lse.dtype), more.to(lse.dtype), share))
    lse.copy_(torch.logaddexp(lse, more_lse))


class FlashAttn:
    """flash-attn 2: half precision, compute capability 8.0 and newer."""

    name = "flash-attn"

    @staticmethod
    def forward(query, key, value, segments, scale):
        """query [N, H, d], key and value [M, K, d] -> out [N, H, d], lse [H, N] fp32."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        return _flash_attn_varlen_forward(
            query, key, value, segments.cu_seqlens_q, segments.cu_seqlens_k, segments.max_q, segments.max_k,
            dropout_p=0.0, softmax_scale=scale, causal=segments.causal,
        )[:2]  # fmt: skip

    @staticmethod
    def backward(grad, query, key, value, out, lse, segments, scale):
        """grad and out [N, H, d], lse [H, N] contiguous -> dq, dk, dv."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        gradients = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
        _flash_attn_varlen_backward(
            grad, query, key, value, out, lse, *gradients, segments.cu_seqlens_q, segments.cu_seqlens_k,
            segments.max_q, segments.max_k, dropout_p=0.0, softmax_scale=scale, causal=segments.causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return gradients


class TorchFlash:
    """The FlashAttention that is built into PyTorch, as `torch.nn.attention.varlen` calls it: the public function gives
    no backward from a merged softmax."""

    name = "torch"

    @staticmethod
    def forward(query, key, value, segments, scale):
        """query [N, H, d], key and value [M, K, d] -> out [N, H, d], lse [H, N] fp32."""
        return torch.ops.aten._flash_attention_forward(
            query, key, value, segments.cu_seqlens_q, segments.cu_seqlens_k, segments.max_q, segments.max_k,
            0.0, segments.causal, False, scale=scale,
        )[:2]  # fmt: skip

    @staticmethod
    def backward(grad, query, key, value, out, lse, segments, scale):
        """grad and out [N, H, d], lse [H, N] contiguous -> dq, dk, dv."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)  # its random state, never read
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse, segments.cu_seqlens_q, segments.cu_seqlens_k, segments.max_q,
            segments.max_k, 0.0, segments.causal, no_dropout, no_dropout, scale=scale,
        )  # fmt: skip


def kernel_for(query):
    """The kernel that runs queries like this one [N, H, d]: FlashAttention where the device, dtype and width allow it,
    else a layout by sequence that is padded within buckets of similar length."""
    return _choose(query.device, query.dtype, query.shape[-1])


@cache
def _choose(device, dtype, width):
    flash = device.type == "cuda" and dtype in HALF and width % 8 == 0 and width <= 256 and _is_ampere(device)
    if flash and _has_flash_attn():
        kernel = FlashAttn
    elif flash and torch.backends.cuda.is_flash_attention_available():
        kernel = TorchFlash
    else:
        kernel = PaddedAttention("cpu" if device.type == "cpu" else "math")
    logger.info("packed attention: %s for %s on %s, head width %d", kernel.name, dtype, device, width)
    return kernel


def _is_ampere(device):
    return torch.cuda.get_device_capability(device)[0] >= 8


def _has_flash_attn():
    if find_spec("flash_attn") is None:
        return False
    try:
        import flash_attn.flash_attn_interface  # noqa: F401
    except ImportError as error:  # built for another torch
        logger.warning("flash-attn is installed but does not load (%s): PyTorch's FlashAttention is used", error)
        return False
    return True
