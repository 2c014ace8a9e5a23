"""The public losses on the interpreted Triton kernels: rows, masks, layouts, given logits and log-probs, torch.compile.

Collected by test_triton_interpret.py, in a process of its own with TRITON_INTERPRET=1.
"""

import math
import shutil
import warnings
from functools import partial

import pytest
import torch
from heads import random_head

import fastgrpo.loss.losses
from fastgrpo import grpo_loss, linear_grpo_loss, logits_grpo_loss
from fastgrpo.kernels import launch, linear_logprob

if not launch.INTERPRET:
    pytest.skip("needs TRITON_INTERPRET=1 before the import", allow_module_level=True)

LENGTHS = [3, 7, 1, 9, 0, 4]
N, D, V = sum(LENGTHS), 16, 70
OBJECTIVES = {
    "dapo": {"beta": 0.1},
    "grpo": {"loss_type": "grpo"},
    "gspo": {"importance_sampling_level": "sequence", "beta": 0.1},
    "bonus": {"entropy_coef": 0.2},
    "vespo": {"loss_type": "vespo", "importance_sampling_mode": "token_mask"},
}


@pytest.fixture(autouse=True, params=("anchored", "recompute"))
def path(request, monkeypatch):
    monkeypatch.setitem(linear_logprob.PATHS, torch.float32, request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield request.param


@pytest.fixture
def batch():
    """hidden, weight, and keyword arguments of a packed batch with a ragged mask."""
    head = random_head(N, D, V)
    g = torch.Generator().manual_seed(3)
    return head.hidden, head.weight, {
        "targets": head.targets,
        "advantages": torch.randn(len(LENGTHS), generator=g),
        "mask": torch.rand(N, generator=g) > 0.3,
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0),
        "old_logps": head.old_logps,
        "ref_logps": head.ref_logps,
    }  # fmt: skip


def device_only_mask(monkeypatch):
    """As on a GPU, where the host does not learn which rows carry gradient."""
    monkeypatch.setattr(fastgrpo.loss.losses, "compacts", lambda compact, backend, tokens: False)


def run(function, tensors, kwargs, backend, factor=1.0):
    """-> (GRPOLossOutput, gradients). Logits are handed over as a copy: they may be overwritten."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    given = [leaves[0].clone()] if function is logits_grpo_loss else leaves
    out = function(*given, backend=backend, **kwargs)
    return out, torch.autograd.grad(out.loss * factor, leaves)


def same(ours, theirs):
    (a, a_grads), (b, b_grads) = ours, theirs
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.logps, b.logps, rtol=1e-5, atol=5e-6)
    assert torch.equal(a.active, b.active) and a.metrics.keys() == b.metrics.keys()
    for name in a.metrics:
        torch.testing.assert_close(a.metrics[name], b.metrics[name], rtol=1e-4, atol=2e-6, check_dtype=False)
    for x, y in zip(a_grads, b_grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("known_to", ("host", "device"))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_linear_grpo_loss(name, known_to, batch, monkeypatch):
    hidden, weight, kwargs = batch
    kwargs = {**kwargs, **OBJECTIVES[name], "return_entropy": True}
    theirs = run(linear_grpo_loss, (hidden, weight), kwargs, "chunked", factor=1.7)
    if known_to == "device":
        device_only_mask(monkeypatch)
    same(run(linear_grpo_loss, (hidden, weight), kwargs, "triton", factor=1.7), theirs)


@pytest.mark.parametrize("chunk_rows", (16, 4))
def test_sequence_level_ratios_where_the_device_alone_knows_the_rows(chunk_rows, batch, monkeypatch):
    """Several chunks: no look at the lengths, which would wait for the device, but a forward pass ahead."""
    hidden, weight, kwargs = batch
    kwargs |= OBJECTIVES["gspo"]
    theirs = run(linear_grpo_loss, (hidden, weight), kwargs, "chunked")
    device_only_mask(monkeypatch)
    several_chunks(monkeypatch, chunk_rows)

    def refused(self):
        raise AssertionError("a host sync")

    for name in ("tolist", "item"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    monkeypatch.setattr(
        fastgrpo.loss.losses, "check_targets", lambda targets, vocab_size: None
    )  # looks, on the CPU alone
    monkeypatch.setattr(fastgrpo.loss.rows, "_is_partition", lambda cu_seqlens, total: True)  # likewise
    ours = run(linear_grpo_loss, (hidden, weight), kwargs, "triton")
    monkeypatch.undo()
    same(ours, theirs)


def several_chunks(monkeypatch, chunk_rows):
    original = fastgrpo.loss.losses.linear_grpo.linear_grpo_loss
    monkeypatch.setattr(fastgrpo.loss.losses.linear_grpo, "linear_grpo_loss", partial(original, chunk_rows=chunk_rows))


def test_softcap_bias_and_temperatures(batch):
    hidden, weight, kwargs = batch
    kwargs |= {"bias": torch.randn(V), "logit_softcap": 4.0, "temperature": torch.rand(N) + 0.5, "beta": 0.1}
    same(*(run(linear_grpo_loss, (hidden, weight), kwargs, backend) for backend in ("triton", "chunked")))


@pytest.mark.parametrize("known_to", ("host", "device"))
@pytest.mark.parametrize("name", ("dapo", "gspo"))
def test_masked_rows_may_hold_anything(name, known_to, batch, monkeypatch):
    hidden, weight, kwargs = batch
    clean = run(linear_grpo_loss, (hidden, weight), {**kwargs, **OBJECTIVES[name]}, "triton")
    out = ~kwargs["mask"]
    hidden, kwargs = hidden.clone(), {k: v.clone() for k, v in kwargs.items()}
    hidden[out] = torch.tensor([math.nan, math.inf] * (D // 2))
    for column in ("old_logps", "ref_logps"):
        kwargs[column][out] = math.nan
    kwargs["targets"][out] = -100
    if known_to == "device":
        device_only_mask(monkeypatch)
    same(run(linear_grpo_loss, (hidden, weight), {**kwargs, **OBJECTIVES[name]}, "triton"), clean)


@pytest.mark.parametrize("known_to", ("host", "device"))
@pytest.mark.parametrize("function", (linear_grpo_loss, logits_grpo_loss))
def test_a_batch_without_a_kept_row(function, known_to, batch, monkeypatch):
    hidden, weight, kwargs = batch
    kwargs["mask"] = torch.zeros(N, dtype=torch.bool)
    if known_to == "device":
        device_only_mask(monkeypatch)
    tensors = (hidden, weight) if function is linear_grpo_loss else (hidden @ weight.T,)
    out, grads = run(function, tensors, kwargs, "triton")
    assert out.loss == 0 and not out.active.any() and (out.logps == 0).all()
    assert all((g == 0).all() for g in grads) and all(v == 0 for v in out.metrics.values())


@pytest.mark.parametrize("name", ("dapo", "gspo"))
def test_rows_from_the_host(name, batch):
    hidden, weight, kwargs = batch
    kwargs |= OBJECTIVES[name]
    rows = kwargs["mask"].nonzero()[:, 0]
    theirs = run(linear_grpo_loss, (hidden, weight), kwargs, "triton")
    same(run(linear_grpo_loss, (hidden, weight), {**kwargs, "rows": rows}, "triton"), theirs)


def test_padded_layout_and_per_token_advantages(batch):
    hidden, weight, kwargs = batch
    shape = (4, 6)
    padded = {k: v.view(shape) for k, v in kwargs.items() if v.shape == (N,)}
    padded["advantages"] = torch.randn(shape)
    same(*(run(linear_grpo_loss, (hidden.view(4, 6, D), weight), padded, b) for b in ("triton", "chunked")))


def test_no_old_logps_is_a_ratio_of_one(batch):
    hidden, weight, kwargs = batch
    kwargs["old_logps"] = None
    out, _ = run(linear_grpo_loss, (hidden, weight), kwargs, "triton")
    assert out.metrics["ratio/mean"] == 1 and out.metrics["ratio/max"] == 1


def test_micro_batches_sum_to_the_batch(batch):
    hidden, weight, kwargs = batch
    del kwargs["cu_seqlens"]
    kwargs |= {"advantages": torch.randn(N), "num_items_in_batch": kwargs["mask"].sum()}
    whole, whole_grads = run(linear_grpo_loss, (hidden, weight), kwargs, "triton")
    halves = []
    for part in (slice(0, 10), slice(10, N)):
        cut = {k: v[part] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in kwargs.items()}
        halves.append(run(linear_grpo_loss, (hidden[part], weight), cut, "triton"))
    torch.testing.assert_close(sum(out.loss for out, _ in halves), whole.loss)
    torch.testing.assert_close(torch.cat([g[0] for _, g in halves]), whole_grads[0])
    torch.testing.assert_close(sum(g[1] for _, g in halves), whole_grads[1])


@pytest.mark.parametrize("inplace", (False, True))
@pytest.mark.parametrize("known_to", ("host", "device"))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_logits_grpo_loss(name, known_to, inplace, batch, monkeypatch):
    hidden, weight, kwargs = batch
    kwargs = {**kwargs, **OBJECTIVES[name], "return_entropy": True, "temperature": torch.rand(N) + 0.5}
    logits = hidden @ weight.T
    logits[~kwargs["mask"]] = math.nan
    theirs = run(logits_grpo_loss, (logits,), kwargs, "chunked", factor=1.7)
    if known_to == "device":
        device_only_mask(monkeypatch)
    same(run(logits_grpo_loss, (logits,), {**kwargs, "inplace": inplace}, "triton", factor=1.7), theirs)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_logits_are_overwritten_and_a_second_backward_is_refused(dtype, batch):
    hidden, weight, kwargs = batch
    logits = (hidden @ weight.T).to(dtype).requires_grad_()
    given = logits.clone()
    out = logits_grpo_loss(given, inplace=True, backend="triton", **kwargs)
    (grad,) = torch.autograd.grad(out.loss * 2, given, retain_graph=True)
    assert grad.data_ptr() == given.data_ptr() and grad.dtype == dtype
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.loss, given)


def test_logits_rows_past_2_to_the_31(batch):
    far = torch.empty_strided((3, V), (2**30, 1), dtype=torch.float16)
    hidden, weight, kwargs = batch
    far.copy_((hidden @ weight.T)[:3])
    arguments = {"targets": kwargs["targets"][:3], "advantages": torch.randn(3), "old_logps": kwargs["old_logps"][:3]}
    near = far.clone(memory_format=torch.contiguous_format)
    same(*(run_strided(x, arguments) for x in (far, near)))


def run_strided(logits, kwargs):
    leaf = logits.detach().requires_grad_()
    out = logits_grpo_loss(leaf, inplace=True, backend="triton", **kwargs)
    return out, torch.autograd.grad(out.loss, leaf)


@pytest.mark.parametrize("name", ("dapo", "gspo"))
def test_grpo_loss(name, batch, monkeypatch):
    _, _, kwargs = batch
    del kwargs["targets"]
    kwargs |= OBJECTIVES[name]
    logps = kwargs["old_logps"] + 0.2 * torch.randn(N)
    theirs = run(grpo_loss, (logps,), kwargs, "chunked")
    same(run(grpo_loss, (logps,), kwargs, "triton"), theirs)
    device_only_mask(monkeypatch)
    same(run(grpo_loss, (logps,), kwargs, "triton"), theirs)


def test_autocast(batch, path):
    """fp32 tensors are cast to autocast's dtype, as nn.Linear would; its products stay as they are."""
    hidden, weight, kwargs = batch
    half = (hidden.half(), weight.half())
    with torch.autocast("cpu", torch.float16):
        ours = run(linear_grpo_loss, (hidden, weight), kwargs, "triton")
    plain, grads = run(linear_grpo_loss, half, kwargs, "triton")
    assert torch.equal(ours[0].loss, plain.loss)
    assert all(torch.equal(a, b.float()) for a, b in zip(ours[1], grads, strict=True))


@pytest.mark.parametrize("name", ("dapo", "gspo"))
def test_torch_compile_over_several_chunks(name, batch, path, monkeypatch):
    if path == "recompute":
        pytest.skip("chunks are its operator's own affair")
    several_chunks(monkeypatch, 8)
    hidden, weight, kwargs = batch
    kwargs |= OBJECTIVES[name]
    kwargs["rows"] = kwargs["mask"].nonzero()[:, 0]

    def loss(hidden, weight):
        return linear_grpo_loss(hidden, weight, backend="triton", **kwargs).loss * 3

    check_compiled(loss, hidden, weight, "aot_eager", exact=name != "gspo")  # compiled, gspo chunks by rows


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
@pytest.mark.parametrize("chunk_rows", (launch.CHUNK_ROWS, 8))
def test_torch_compile_with_inductor(chunk_rows, batch, path, monkeypatch):
    """It lays out the operators' results anew and takes their mutations apart."""
    if path == "recompute":
        pytest.skip("no pitch, no chunks outside of the operator")
    several_chunks(monkeypatch, chunk_rows)
    hidden, weight, kwargs = batch
    kwargs |= OBJECTIVES["dapo"]
    kwargs["rows"] = torch.arange(0, N, 2)
    check_compiled(
        lambda h, w: linear_grpo_loss(h * 1.5, w, backend="triton", **kwargs).loss * 3, hidden, weight, "inductor"
    )


def check_compiled(loss, hidden, weight, backend, exact=True):
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    theirs, ours = (torch.autograd.grad(f(*leaves), leaves) for f in (loss, compiled))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@pytest.mark.parametrize("function", (linear_grpo_loss, logits_grpo_loss, grpo_loss, fastgrpo.linear_logprob))
def test_torch_compile(function, backend, batch, path):
    hidden, weight, kwargs = batch
    kwargs["rows"] = torch.arange(0, N, 2)
    if function is grpo_loss:
        targets = kwargs.pop("targets")

    def loss(hidden, weight):
        if function is fastgrpo.linear_logprob:
            return function(hidden, weight, kwargs["targets"], backend="triton").sum()
        if function is grpo_loss:
            return function((hidden * weight[targets]).sum(-1), backend="triton", **kwargs).loss
        tensors = (hidden, weight) if function is linear_grpo_loss else (hidden @ weight.T,)
        return function(*tensors, backend="triton", **kwargs).loss

    check_compiled(loss, hidden, weight, backend)
