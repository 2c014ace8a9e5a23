"""Packed attention against plain softmax over one sequence at a time, forward and backward, and the merge of parts."""

import logging
import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from fastgrpo.policy import varlen
from fastgrpo.policy.varlen import FlashAttn, PaddedAttention, Segments, TorchFlash, VarlenAttention, kernel_for

SCALE = 0.3
CPU_KERNELS = [PaddedAttention("cpu"), PaddedAttention("math")]
RAGGED = [5, 1, 12, 3, 3, 7]


def inputs(queries, heads=4, kv_heads=2, width=8, keys=None, dtype=torch.float64, device="cpu"):
    shapes = [(queries, heads), *[(keys or queries, kv_heads)] * 2]
    return [torch.randn(*shape, width, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def bounds(lengths):
    return list(pairwise(torch.tensor([0, *lengths]).cumsum(0).tolist()))


def softmax_attention(query, key, value, visible):
    """query [N, H, d], key and value [M, K, d], visible [N, M] -> out [N, H, d], lse [H, N]; differentiable."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    scores = torch.einsum("nhd,mhd->hnm", query, key) * SCALE
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value), scores.logsumexp(-1)


def causal_mask(lengths):
    return torch.block_diag(*[torch.ones(n, n).tril() for n in lengths]).bool()


def rectangles(queries, keys):
    return torch.block_diag(*[torch.ones(q, k) for q, k in zip(queries, keys, strict=True)]).bool()


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spare", [0, 2**17])
def test_a_part_against_softmax(kernel, heads, kv_heads, causal, spare, monkeypatch):
    monkeypatch.setattr(varlen, "SPARE", spare)
    queries, keys = (RAGGED, RAGGED) if causal else (RAGGED, [2, 9, 4, 4, 1, 6])
    query, key, value = inputs(sum(queries), heads, kv_heads, keys=sum(keys))
    visible = causal_mask(queries) if causal else rectangles(queries, keys)
    expected, expected_lse = softmax_attention(query, key, value, visible)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (query, key, value), grad)
    part = Segments(queries, keys, "cpu", causal=causal)
    with torch.no_grad():
        out, lse = kernel.forward(query, key, value, part, SCALE)
        mine = kernel.backward(grad, query, key, value, out, lse, part, SCALE)
    assert (len(part.buckets.buckets) > 1) == (spare == 0)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)
    for ours, theirs in zip(mine, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)


def prompts_and_branches():
    """The parts of two shared prompts (4 and 6 tokens, 3 and 2 branches) and one more sequence, and their mask."""
    lengths, prompts, of_each = [4, 6, 3, 1, 5, 2, 2, 7], [4, 6], [9, 4]
    parts = [
        Segments(lengths, lengths, "cpu", causal=True),
        Segments(of_each, prompts, "cpu", causal=False, query_span=slice(10, 23), key_span=slice(0, 10)),
    ]
    visible = causal_mask(lengths)
    visible[10:23, :10] = rectangles(of_each, prompts)
    return parts, visible


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)
def test_merged_parts_are_one_softmax(kernel, monkeypatch):
    """The backward of each part takes the merged output and log-sum-exp, in the function that also runs on CUDA."""
    monkeypatch.setattr(varlen, "kernel_for", lambda query: kernel)
    parts, visible = prompts_and_branches()
    tensors = inputs(len(visible))
    expected, _ = softmax_attention(*tensors, visible)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, tensors, grad)
    out = VarlenAttention.apply(*tensors, parts, SCALE)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(out, tensors, grad), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)


def test_the_backward_of_a_part_needs_the_merged_softmax():
    """What the test above would miss if merging did not matter: a part's own log-sum-exp gives other gradients."""
    parts, _ = prompts_and_branches()
    query, key, value = (tensor.detach() for tensor in inputs(31))
    kernel = CPU_KERNELS[0]
    out, lse = kernel.forward(query, key, value, parts[0], SCALE)
    grad = torch.randn_like(out)
    alone = kernel.backward(grad, query, key, value, out, lse, parts[0], SCALE)
    more, more_lse = kernel.forward(*varlen.part_of(parts[1], query, key, value), parts[1], SCALE)
    varlen.merge_(out[parts[1].query_span], lse[:, parts[1].query_span], more, more_lse)
    merged = kernel.backward(grad, query, key, value, out, lse, parts[0], SCALE)
    assert (alone[0] - merged[0]).abs().max() > 0.01


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
def test_lower_precision(dtype, tolerance):
    parts, visible = prompts_and_branches()
    tensors = inputs(len(visible))
    expected, _ = softmax_attention(*tensors, visible)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, tensors, grad)
    low = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    out = VarlenAttention.apply(*low, parts, SCALE)
    mine = (out, *torch.autograd.grad(out, low, grad.to(dtype)))
    for ours, theirs in zip(mine, (expected, *gradients), strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).norm() < tolerance * theirs.norm()


def test_second_derivatives_are_refused():
    tensors = inputs(23)
    out = VarlenAttention.apply(*tensors, [Segments([12, 11], [12, 11], "cpu", causal=True)], SCALE)
    with pytest.raises(RuntimeError, match="packed attention has no second derivatives"):
        torch.autograd.grad(out.sum(), tensors, create_graph=True)


def test_plain_products_by_blocks_of_queries(monkeypatch):
    monkeypatch.setattr(varlen, "SCORES_AT_ONCE", 2 * 4 * 12 * 5)
    segments = Segments([12, 11], [12, 11], "cpu", causal=True)
    query, key, value = (tensor.detach() for tensor in inputs(23))
    whole, blocks = CPU_KERNELS
    out, lse = whole.forward(query, key, value, segments, SCALE)
    grad = torch.randn_like(out)
    torch.testing.assert_close(blocks.forward(query, key, value, segments, SCALE), (out, lse))
    expected = whole.backward(grad, query, key, value, out, lse, segments, SCALE)
    torch.testing.assert_close(blocks.backward(grad, query, key, value, out, lse, segments, SCALE), expected)


def test_the_choice_is_logged_once(caplog):
    varlen._choose.cache_clear()
    with caplog.at_level(logging.INFO, "fastgrpo.policy.varlen"):
        for _ in range(2):
            assert kernel_for(torch.zeros(3, 4, 8)).name == "cpu"
    assert [record.message for record in caplog.records] == [
        "packed attention: cpu for torch.float32 on cpu, head width 8"
    ]


def cuda_case(dtype):
    """Long ragged sequences with grouped heads, a shared prompt among them, on the GPU."""
    lengths = [513, 200, 130, 1, 257, 64, 300]
    parts = [
        Segments(lengths, lengths, "cuda", causal=True),
        Segments([131, 321], [513, 200], "cuda", causal=False, query_span=slice(713, 1165), key_span=slice(0, 713)),
    ]
    return parts, inputs(sum(lengths), 14, 2, 64, dtype=dtype, device="cuda")


def gradients_of(kernel, parts, tensors, grad, monkeypatch, scale=SCALE / 2):
    monkeypatch.setattr(varlen, "kernel_for", lambda query: kernel)
    out = VarlenAttention.apply(*tensors, parts, scale)
    return out, *torch.autograd.grad(out, tensors, grad)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Flash Attention defaults to a non-deterministic algorithm")
@pytest.mark.parametrize("kernel", [TorchFlash, FlashAttn], ids=lambda kernel: kernel.name)
def test_flash_attention_on_cuda(kernel, monkeypatch):
    """Against plain products in fp64: no more than 1.5 times the error of plain products in bf16."""
    if kernel is FlashAttn:
        pytest.importorskip("flash_attn")
    parts, tensors = cuda_case(torch.bfloat16)
    grad = torch.randn_like(tensors[0])
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    math = CPU_KERNELS[1]
    exact = gradients_of(math, parts, wide, grad.double(), monkeypatch)
    plain = gradients_of(math, parts, tensors, grad, monkeypatch)
    mine = gradients_of(kernel, parts, tensors, grad, monkeypatch)
    for ours, theirs, truth in zip(mine, plain, exact, strict=True):
        error, allowed = ((value.double() - truth).norm() / truth.norm() for value in (ours, theirs))
        assert error < max(1.5 * allowed, 6e-3)


@pytest.mark.gpu
def test_the_choice_on_cuda():
    flash = kernel_for(torch.zeros(3, 4, 64, dtype=torch.bfloat16, device="cuda"))
    assert flash in (FlashAttn, TorchFlash)
    for dtype, width in ((torch.float32, 64), (torch.bfloat16, 20)):
        assert kernel_for(torch.zeros(3, 4, width, dtype=dtype, device="cuda")).name == "math"


def test_the_built_in_flash_attention_takes_these_arguments():
    """On meta tensors: PyTorch's own schema and shapes, no kernel."""
    queries, keys = [3, 5], [2, 9]
    query, key, value = (tensor.detach() for tensor in inputs(8, 4, 2, 16, 11, torch.bfloat16, "meta"))
    segments = Segments(queries, keys, "meta", causal=False)
    out, lse = TorchFlash.forward(query, key, value, segments, SCALE)
    assert out.shape == query.shape and lse.shape == (4, 8) and lse.dtype == torch.float32
    gradients = TorchFlash.backward(torch.empty_like(out), query, key, value, out, lse, segments, SCALE)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


@pytest.fixture
def stand_in(monkeypatch):
    """flash-attn 2.7's two functions, with its signatures, computed by plain products."""

    def of(cu_q, cu_k, causal):
        return Segments(cu_q.diff().tolist(), cu_k.diff().tolist(), "cpu", causal=causal)

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == 0 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max())
        segments = of(cu_seqlens_q, cu_seqlens_k, causal)
        return *CPU_KERNELS[1].forward(q, k, v, segments, softmax_scale), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0, -1, -1, 0, None)
        assert softmax_lse.is_contiguous() and deterministic is True
        segments = of(cu_seqlens_q, cu_seqlens_k, causal)
        gradients = CPU_KERNELS[1].backward(dout, q, k, v, out, softmax_lse, segments, softmax_scale)
        for mine, theirs in zip((dq, dk, dv), gradients, strict=True):
            mine.copy_(theirs)
        return torch.empty(0)

    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


def test_the_call_of_flash_attn(stand_in, monkeypatch):
    parts, visible = prompts_and_branches()
    tensors = inputs(len(visible))
    expected, _ = softmax_attention(*tensors, visible)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, tensors, grad)
    mine = gradients_of(FlashAttn, parts, tensors, grad, monkeypatch, SCALE)
    for ours, theirs in zip(mine, (expected, *gradients), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)
