"""Attention over packed sequences, forward and backward, by the fastest kernel that is installed.

The softmax over two sets of keys a and b is exactly the merge of two attentions by their log-sum-exps:

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The backward pass over either set needs only the merged output and log-sum-exp, as in ring attention
(arXiv 2310.01889). With P = exp(scale q k^T - lse) and D = sum(dout * out),

    dv = P^T dout        dS = P * (dout v^T - D)        dq = scale dS k        dk = scale dS^T q

This is why every `AttentionKernel` returns its log-sum-exp, and why its backward pass takes the output and the
log-sum-exp of the whole softmax.

Shapes: N packed query tokens, M packed key tokens, H query heads, K key heads (H is a multiple of K), d head width.
"""

import logging
from functools import cache

import torch

from fastgrpo.kernels.objectives import first_order
from fastgrpo.policy.packages import package_obstacle
from fastgrpo.policy.padded import PaddedAttention
from fastgrpo.policy.segments import AttentionKernel, Segments

logger = logging.getLogger(__name__)

FLASH_ATTN = "flash_attn.flash_attn_interface"  # the module of flash-attn that we call
HALF = (torch.float16, torch.bfloat16)


class VarlenAttention(torch.autograd.Function):
    """Attention of packed queries over the keys of one or several parts, as one softmax.

    It takes the query [N, H, d], key and value [M, K, d], the list of the parts' `Segments`, and the factor on the
    scores; it returns [N, H, d]. The first part covers all queries. Every further part adds keys to some of them.
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
    """Select the queries, keys and values of one part.

    Args:
        part: The part, which tells where its queries and keys stand among all packed tokens.
        query: [N, H, d], all packed queries.
        key: [M, K, d], all packed keys.
        value: [M, K, d], all packed values.
    """
    return query[part.query_span], key[part.key_span], value[part.key_span]


def merge_(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Merge two attentions of the same queries over different keys, in place of the first.

    Args:
        out: [N, H, d] output of the first attention; overwritten.
        lse: [H, N] log-sum-exp of the first attention; overwritten.
        more: [N, H, d] output of the second attention.
        more_lse: [H, N] log-sum-exp of the second attention.
    """
    share = torch.sigmoid(more_lse - lse).T[..., None]  # exp(more_lse - merged)
    out.copy_(torch.lerp(out.to(lse.dtype), more.to(lse.dtype), share))
    lse.copy_(torch.logaddexp(lse, more_lse))


class FlashAttn(AttentionKernel):
    """The kernels of flash-attn 2, for half precision on GPUs of compute capability 8.0 and newer."""

    name = "flash-attn"

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
    """The FlashAttention that is built into PyTorch, for the same GPUs.

    It calls the operators that `torch.nn.attention.varlen` calls, because that public function offers no backward pass
    from a merged softmax.
    """

    name = "torch"

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


def kernel_for(query: torch.Tensor) -> AttentionKernel | type[AttentionKernel]:
    """Choose the kernel for queries of this device, dtype and head width, and log the choice once.

    Args:
        query: [N, H, d].
    """
    return _choose(query.device, query.dtype, query.shape[-1])


@cache
def _choose(device, dtype, width):
    flash = device.type == "cuda" and dtype in HALF and width % 8 == 0 and width <= 256 and _is_ampere(device)
    if flash and package_obstacle(FLASH_ATTN) is None:
        kernel = FlashAttn
    elif flash and torch.backends.cuda.is_flash_attention_available():
        kernel = TorchFlash
    else:
        kernel = PaddedAttention("cpu" if device.type == "cpu" else "math")
    logger.info("packed attention: %s for %s on %s, head width %d", kernel.name, dtype, device, width)
    return kernel


def _is_ampere(device):
    return torch.cuda.get_device_capability(device)[0] >= 8
