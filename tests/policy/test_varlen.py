"""Packed attention against plain softmax over one sequence at a time, forward and backward, and the merge of parts."""

import random
import sys
from functools import partial
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.nn.attention as torch_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgrpo.policy import varlen
from fastgrpo.policy.attention import PackedAttention
from fastgrpo.policy.device import package_obstacle
from fastgrpo.policy.varlen import FlashAttn, PaddedAttention, Segments, TorchFlash, VarlenAttention, kernel_for

SCALE = 0.3
CPU_KERNELS = [PaddedAttention("cpu"), PaddedAttention("math")]


def inputs(queries, heads=4, kv_heads=2, width=8, keys=None, dtype=torch.float64, device="cpu"):
    shapes = [(queries, heads), *[(keys or queries, kv_heads)] * 2]
    return [torch.randn(*shape, width, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def causal_mask(lengths):
    return torch.block_diag(*[torch.ones(n, n).tril() for n in lengths]).bool()


def rectangles(queries, keys):
    return torch.block_diag(*[torch.ones(q, k) for q, k in zip(queries, keys, strict=True)]).bool()


def check(found, expected, tolerance=1e-11):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def of_softmax(tensors, visible):
    """Plain attention: out [N, H, d], lse [H, N], a random gradient of out, and those of query, key and value."""
    query, key, value = tensors
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = (torch.einsum("nhd,mhd->hnm", query, key) * SCALE).masked_fill(~visible, -torch.inf)
    out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value)
    grad = torch.randn_like(out)
    return out, scores.logsumexp(-1), grad, torch.autograd.grad(out, tensors, grad)


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=7)
KERNEL = pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)


@KERNEL
@settings(max_examples=30)
@given(LENGTHS, LENGTHS, st.booleans(), st.sampled_from([(4, 4), (4, 2), (6, 1)]),
       st.sampled_from([0, 2**17]), st.sampled_from([240, 2**26]))  # fmt: skip
def test_a_part_against_softmax(kernel, queries, keys, causal, heads, spare, scores_at_once):
    queries, keys = (queries, queries) if causal else zip(*zip(queries, keys, strict=False), strict=True)
    tensors = inputs(sum(queries), *heads, keys=sum(keys))
    visible = causal_mask(queries) if causal else rectangles(queries, keys)
    expected, expected_lse, grad, gradients = of_softmax(tensors, visible)
    part = Segments(list(queries), list(keys), "cpu", causal=causal)
    with torch.no_grad(), mock.patch.multiple(varlen, SPARE=spare, SCORES_AT_ONCE=scores_at_once):
        out, lse = kernel.forward(*tensors, part, SCALE)
        check((out, lse), (expected, expected_lse), 1e-12)
        check(kernel.backward(grad, *tensors, out, lse, part, SCALE), gradients)


def prompts_and_branches(prompts=(4, 6), branches=((3, 1, 5), (2, 2)), rest=(7,)):
    """The parts of shared prompts with their branches and of other sequences, and which keys each token sees."""
    own = [length for of_prompt in branches for length in of_prompt]
    lengths = [*prompts, *own, *rest]
    visible, start = causal_mask(lengths), sum(prompts)
    visible[start : start + sum(own), :start] = rectangles(map(sum, branches), prompts)
    return PackedAttention(lengths, "cpu", branches).parts, visible


@KERNEL
@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=2, max_size=4)), min_size=1,
                max_size=3), st.lists(st.integers(1, 9), max_size=3))  # fmt: skip
def test_merged_parts_are_one_softmax(kernel, shared, rest):
    parts, visible = prompts_and_branches(*zip(*shared, strict=True), rest)
    tensors = inputs(len(visible))
    expected, _, grad, gradients = of_softmax(tensors, visible)
    with mock.patch.object(varlen, "kernel_for", lambda query: kernel):
        out = VarlenAttention.apply(*tensors, parts, SCALE)
    check((out, *torch.autograd.grad(out, tensors, grad)), (expected, *gradients))


@KERNEL
def test_16_bit_attention_is_that_of_its_inputs_in_fp32_rounded_once(kernel):
    part = Segments([5, 1, 7], [5, 1, 7], "cpu", causal=True)
    low = [tensor.detach() for tensor in inputs(13, dtype=torch.bfloat16)]
    out, lse = kernel.forward(*low, part, SCALE)
    wide, wide_lse = kernel.forward(*(tensor.float() for tensor in low), part, SCALE)
    assert torch.equal(out, wide.bfloat16()) and torch.equal(lse, wide_lse)
    low = out, *low, out
    gradients = kernel.backward(*low, lse, part, SCALE)
    expected = kernel.backward(*(tensor.float() for tensor in low), lse, part, SCALE)
    assert all(map(torch.equal, gradients, (gradient.bfloat16() for gradient in expected)))


def test_padding_is_bounded_for_a_long_tail():
    generator = random.Random(0)
    lengths = [min(2048, int(generator.expovariate(1 / 150)) + 1) for _ in range(200)] + [2048]
    buckets = varlen.Buckets(lengths, lengths, "cpu", causal=True)
    places = sum(len(bucket.queries) for bucket in buckets.buckets)
    assert places < 1.5 * sum(lengths) < 0.2 * len(lengths) * max(lengths)
    assert len(buckets.buckets) < 20


def test_second_derivatives_are_refused():
    tensors = inputs(23)
    out = VarlenAttention.apply(*tensors, [Segments([12, 11], [12, 11], "cpu", causal=True)], SCALE)
    with pytest.raises(RuntimeError, match="packed attention has no second derivatives"):
        torch.autograd.grad(out.sum(), tensors, create_graph=True)


def cuda_case(dtype):
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
@pytest.mark.parametrize("kernel", [TorchFlash("torch"), FlashAttn], ids=lambda kernel: kernel.name)
def test_flash_attention_on_cuda(kernel, monkeypatch):
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
    assert flash is FlashAttn or isinstance(flash, TorchFlash)
    for dtype, width in ((torch.float32, 64), (torch.bfloat16, 20)):
        assert kernel_for(torch.zeros(3, 4, width, dtype=dtype, device="cuda")).name == "math"


def test_the_built_in_flash_attention_takes_these_arguments():
    queries, keys = [3, 5], [2, 9]
    query, key, value = (tensor.detach() for tensor in inputs(8, 4, 2, 16, 11, torch.bfloat16, "meta"))
    segments = Segments(queries, keys, "meta", causal=False)
    out, lse = TorchFlash.forward(query, key, value, segments, SCALE)
    assert out.shape == query.shape and lse.shape == (4, 8) and lse.dtype == torch.float32
    gradients = TorchFlash.backward(torch.empty_like(out), query, key, value, out, lse, segments, SCALE)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


def test_the_call_of_flash_attn(monkeypatch):
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
    parts, visible = prompts_and_branches()
    tensors = inputs(len(visible))
    expected, _, grad, gradients = of_softmax(tensors, visible)
    check(gradients_of(FlashAttn, parts, tensors, grad, monkeypatch, SCALE), (expected, *gradients))


@pytest.fixture
def hopper(monkeypatch):
    """The choice of a kernel as on an H100 without packages."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr("fastgrpo.loss.dispatch.launch.describe", str)
    monkeypatch.setattr("fastgrpo.loss.dispatch._verdicts", {})
    for name in ("is_current_stream_capturing", "get_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda: False)
    for cached in (package_obstacle, varlen._choose):
        cached.cache_clear()
    yield partial(varlen.use_attention, device=torch.device("cuda"), dtype=torch.bfloat16, width=64)
    varlen.use_attention("sdpa", torch.device("cpu"), torch.float32, 64)
    varlen.use_attention("auto", torch.device("cpu"), torch.float32, 64)
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]
    for cached in (package_obstacle, varlen._choose):
        cached.cache_clear()


def chosen(width=64):
    return varlen._choose(varlen._asked, torch.device("cuda"), torch.bfloat16, width).name


def test_flash_attn_4_alone_is_activated_and_named_in_the_log(hopper, tmp_path, monkeypatch, caplog):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/interface.py").write_text("_flash_attn_fwd = _flash_attn_bwd = None")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(varlen, "_difference", lambda *kernel: None)
    with caplog.at_level("INFO"):
        assert chosen() == "flash-attn 4" and "packed attention: flash-attn 4" in caplog.text
    assert torch_attention.current_flash_attention_impl() == "FA4"
    assert chosen(width=256) == "torch"  # wider heads than it supports
    assert package_obstacle(varlen.FLASH_ATTN) == "needs the package: pip install flash-attn --no-build-isolation"
    hopper("sdpa")
    assert chosen() == "torch" and torch_attention.current_flash_attention_impl() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    with pytest.raises(ValueError, match=r"supports compute capabilities 9.x, 10.x; the GPU has 12.0"):
        hopper("fa4")


def test_a_kernel_that_fails_its_check_is_not_used(hopper, monkeypatch, caplog):
    monkeypatch.setattr(varlen, "package_obstacle", lambda module: None)
    monkeypatch.setattr(varlen, "_difference", lambda *kernel: "dq differs")
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", lambda name: None)
    assert chosen() == "torch" and caplog.text.count("dq differs") == 3
    hopper("fa3")
    with pytest.raises(RuntimeError, match=r"flash-attn 3 failed its check .* Use attention='auto'"):
        chosen(width=128)


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
def test_a_kernel_that_is_not_available_is_refused(hopper, name):
    with pytest.raises(ValueError, match=rf"attention='{name}' needs the package: pip install .*attention='auto'"):
        hopper(name)
    with pytest.raises(ValueError, match=rf"attention='{name}' needs a CUDA device"):
        hopper(name, device=torch.device("cpu"))


@pytest.mark.parametrize("wrong, what", [(None, None), ("forward", "output"), ("backward", "dq")])
def test_the_check_of_a_kernel_compares_outputs_and_gradients(monkeypatch, wrong, what):
    kernel = PaddedAttention("math")
    if wrong:
        right = getattr(kernel, wrong)
        monkeypatch.setattr(kernel, wrong, lambda *given: (right(*given)[0] * 1.1, *right(*given)[1:]))
    found = varlen._difference(kernel, torch.device("cpu"), torch.bfloat16, 32)
    assert found is None if what is None else found.startswith(what)
