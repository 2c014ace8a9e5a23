"""linear_grpo_loss with everything around its kernels: which rows are kept, masks, layouts, torch.compile.

The kernels have their own files; this one mirrors loss/losses.py with the Triton backend.

Run by test_interpreted.py, in a process with TRITON_INTERPRET=1.
"""

import math
import shutil
from functools import partial

import pytest
import torch
from loss_runs import OBJECTIVES, D, N, V, check_compiled, device_only_mask, run, same

import fastgrpo.loss.inputs
import fastgrpo.loss.losses
from fastgrpo import grpo_loss, linear_grpo_loss, logits_grpo_loss
from fastgrpo.kernels import launch


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
    monkeypatch.setattr(fastgrpo.loss.inputs, "_on_host", lambda values: False)
    ours = run(linear_grpo_loss, (hidden, weight), kwargs, "triton")
    monkeypatch.undo()
    same(ours, theirs)


def several_chunks(monkeypatch, chunk_rows):
    original = fastgrpo.loss.losses.head_kernels.linear_grpo_loss
    monkeypatch.setattr(fastgrpo.loss.losses.head_kernels, "linear_grpo_loss", partial(original, chunk_rows=chunk_rows))


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


def test_anomaly_mode_asserts_what_active_rows_hold(batch, monkeypatch):
    """As on a GPU: the host does not look, and the device asserts. What masked rows hold is replaced by then."""
    hidden, weight, kwargs = batch
    device_only_mask(monkeypatch)
    monkeypatch.setattr(fastgrpo.loss.inputs, "_on_host", lambda values: False)
    out = ~kwargs["mask"]
    temperature = torch.ones(N).masked_fill(out, 0)
    kwargs |= {"old_logps": kwargs["old_logps"].masked_fill(out, math.nan), "temperature": temperature}
    kwargs["token_weights"] = torch.ones(N).masked_fill(out, math.nan)
    first = kwargs["mask"].nonzero()[0]
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        linear_grpo_loss(hidden, weight, **kwargs, backend="triton")
        for name, bad in (("token_weights", math.nan), ("temperature", 0.0), ("targets", V)):
            broken = kwargs[name].index_fill(0, first, bad)
            with pytest.raises(RuntimeError, match=f"{name} must be"):
                linear_grpo_loss(hidden, weight, **{**kwargs, name: broken}, backend="triton")


@pytest.mark.parametrize("name", ("linear_grpo_loss", "logits_grpo_loss", "grpo_loss", "linear_logprob"))
def test_second_derivatives_are_refused_by_name(name, batch):
    hidden, weight, kwargs = batch
    hidden, targets, advantages = hidden.clone().requires_grad_(), kwargs["targets"], torch.ones(N)
    loss = {
        "linear_grpo_loss": lambda: linear_grpo_loss(hidden, weight, targets, advantages, backend="triton").loss,
        "logits_grpo_loss": lambda: logits_grpo_loss(hidden @ weight.T, targets, advantages, backend="triton").loss,
        "grpo_loss": lambda: grpo_loss((hidden @ weight.T)[:, 0], None, advantages, backend="triton").loss,
        "linear_logprob": lambda: fastgrpo.linear_logprob(hidden, weight, targets, backend="triton").sum(),
    }[name]()
    with pytest.raises(RuntimeError, match=f"^{name} has no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("known_to", ("host", "device"))
def test_a_batch_without_a_kept_row(known_to, batch, monkeypatch):
    hidden, weight, kwargs = batch
    kwargs["mask"] = torch.zeros(N, dtype=torch.bool)
    if known_to == "device":
        device_only_mask(monkeypatch)
    out, grads = run(linear_grpo_loss, (hidden, weight), kwargs, "triton")
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


def test_autocast(batch):
    """fp32 tensors are cast to autocast's dtype, as nn.Linear would; its products stay as they are."""
    hidden, weight, kwargs = batch
    half = (hidden.half(), weight.half())
    with torch.autocast("cpu", torch.float16):
        ours = run(linear_grpo_loss, (hidden, weight), kwargs, "triton")
    plain, grads = run(linear_grpo_loss, half, kwargs, "triton")
    assert torch.equal(ours[0].loss, plain.loss)
    assert all(torch.equal(a, b.float()) for a, b in zip(ours[1], grads, strict=True))


@pytest.mark.parametrize("name", ("dapo", "gspo"))
def test_torch_compile_over_several_chunks(name, batch, monkeypatch):
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
def test_torch_compile_with_inductor(chunk_rows, batch, monkeypatch):
    """It lays out the operators' results anew and takes their mutations apart."""
    several_chunks(monkeypatch, chunk_rows)
    hidden, weight, kwargs = batch
    kwargs |= OBJECTIVES["dapo"]
    kwargs["rows"] = torch.arange(0, N, 2)
    check_compiled(
        lambda h, w: linear_grpo_loss(h * 1.5, w, backend="triton", **kwargs).loss * 3, hidden, weight, "inductor"
    )


# "eager" stops after the first half of what "aot_eager" does.
@pytest.mark.parametrize("backend", (pytest.param("eager", marks=pytest.mark.slow), "aot_eager"))
@pytest.mark.parametrize("function", (linear_grpo_loss, fastgrpo.linear_logprob))
def test_torch_compile(function, backend, batch):
    hidden, weight, kwargs = batch
    kwargs["rows"] = torch.arange(0, N, 2)

    def loss(hidden, weight):
        if function is fastgrpo.linear_logprob:
            return function(hidden, weight, kwargs["targets"], backend="triton").sum()
        return function(hidden, weight, backend="triton", **kwargs).loss

    check_compiled(loss, hidden, weight, backend)
