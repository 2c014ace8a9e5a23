"""The losses with everything around their kernels: which rows are kept, masks, layouts, torch.compile."""

import math
import shutil
from functools import partial
from itertools import product

import pytest
import torch
from loss_runs import OBJECTIVES, D, N, V, device_only_mask, run, same
from objective_cases import EVERY, SAMPLER_CASES

import fastgrpo.loss.inputs
import fastgrpo.loss.losses
from fastgrpo import grpo_loss, linear_grpo_loss, logits_grpo_loss
from fastgrpo.kernels import launch

slow = partial(pytest.param, marks=pytest.mark.slow)


def known(*quick):
    """Parametrize by objectives, and by who knows which rows are kept: on a GPU only the device."""
    cases = product(OBJECTIVES, ("host", "device"))
    return pytest.mark.parametrize(
        ("name", "known_to"), [pytest.param(*x, marks=[] if x in quick else [pytest.mark.slow]) for x in cases]
    )


TOKENS = {name: knobs for name, knobs in EVERY.items() if not knobs.get("entropy_coef")}


def arguments(name, kwargs):
    """Return the arguments of an objective; vespo's weigh the tokens by a sampler's log-probs."""
    kwargs = {**kwargs, **OBJECTIVES[name], "return_entropy": True}
    return kwargs | ({"sampler_logps": kwargs["old_logps"] + 0.2 * torch.randn(N)} if name == "vespo" else {})


def spoilt(hidden, kwargs):
    """Hidden states and arguments whose masked rows hold what must never be read."""
    out = ~kwargs["mask"]
    changed = {name: kwargs[name].masked_fill(out, math.nan) for name in kwargs if name.endswith("_logps")}
    changed["targets"] = kwargs["targets"].masked_fill(out, -100)
    anything = torch.tensor([math.nan, math.inf] * (D // 2))
    return hidden.where(~out[:, None], anything), {**kwargs, **changed}


@known(("dapo", "device"), ("gspo", "host"), ("bonus", "device"))
def test_linear_grpo_loss(name, known_to, batch, monkeypatch):
    hidden, weight, kwargs = batch
    kwargs = arguments(name, kwargs)
    kwargs |= {"targets": kwargs["targets"].clamp(min=1), "bias": torch.zeros(V)}
    kwargs["bias"][0] = -math.inf  # the id that stands for the targets of rows that are not kept
    theirs = run(linear_grpo_loss, (hidden, weight), kwargs, "chunked", factor=1.7)
    hidden, kwargs = spoilt(hidden, kwargs)
    if known_to == "device":
        device_only_mask(monkeypatch)
    else:
        several_chunks(monkeypatch, 10)  # which end with sequences, where the objective looks at these
    same(run(linear_grpo_loss, (hidden, weight), kwargs, "triton", factor=1.7), theirs)


@known(("gspo", "device"))
def test_logits_grpo_loss(name, known_to, batch, monkeypatch):
    hidden, weight, kwargs = batch
    kwargs = {**arguments(name, kwargs), "temperature": torch.rand(N) + 0.5}
    logits = hidden @ weight.T
    logits[~kwargs["mask"]] = math.nan
    theirs = run(logits_grpo_loss, (logits,), kwargs, "chunked", factor=1.7)
    if known_to == "device":
        device_only_mask(monkeypatch)
    for inplace in (False, True):
        same(run(logits_grpo_loss, (logits,), {**kwargs, "inplace": inplace}, "triton", factor=1.7), theirs)


@pytest.mark.parametrize("name", TOKENS)
def test_every_objective(name, batch, monkeypatch):
    """By the loss of log-probs; the heads and the loss of logits run the same kernel or the same formulas."""
    _, _, kwargs = batch
    del kwargs["targets"]
    if name in SAMPLER_CASES:
        kwargs["sampler_logps"] = kwargs["old_logps"] + 0.2 * torch.randn(N)
        kwargs["sampler_logps"][3] = math.nan
    kwargs |= TOKENS[name]
    logps = kwargs["old_logps"] + 0.2 * torch.randn(N)
    theirs = run(grpo_loss, (logps,), kwargs, "chunked")
    device_only_mask(monkeypatch)
    same(run(grpo_loss, (logps,), kwargs, "triton"), theirs)


def several_chunks(monkeypatch, chunk_rows):
    original = fastgrpo.loss.losses.head_kernels.linear_grpo_loss
    monkeypatch.setattr(fastgrpo.loss.losses.head_kernels, "linear_grpo_loss", partial(original, chunk_rows=chunk_rows))


def test_sequence_level_ratios_where_only_the_device_knows_the_rows(batch, monkeypatch):
    """Several chunks: no look at the lengths, which would wait for the device, but a forward pass ahead."""
    hidden, weight, kwargs = batch
    kwargs |= OBJECTIVES["gspo"]
    theirs = run(linear_grpo_loss, (hidden, weight), kwargs, "chunked")
    device_only_mask(monkeypatch)
    several_chunks(monkeypatch, 8)  # a sequence is longer
    for name in ("tolist", "item"):  # a host sync
        monkeypatch.setattr(torch.Tensor, name, None)
    monkeypatch.setattr(fastgrpo.loss.inputs, "_on_host", lambda values: False)
    ours = run(linear_grpo_loss, (hidden, weight), kwargs, "triton")
    monkeypatch.undo()
    same(ours, theirs)


@pytest.mark.parametrize("loss", (linear_grpo_loss, slow(logits_grpo_loss)))
def test_a_batch_without_a_kept_row(loss, batch, monkeypatch):
    hidden, weight, kwargs = batch
    kwargs |= {"mask": torch.zeros(N, dtype=torch.bool), "sampler_logps": torch.zeros(N)}
    tensors = (hidden, weight) if loss is linear_grpo_loss else (hidden @ weight.T,)
    for known_to in ("host", "device"):
        if known_to == "device":
            device_only_mask(monkeypatch)
        out, grads = run(loss, tensors, kwargs, "triton")
        assert out.loss == 0 and not out.active.any() and (out.logps == 0).all()
        assert all((g == 0).all() for g in grads) and all(v == 0 for v in out.metrics.values())


def test_autocast(batch):
    """fp32 tensors are cast to autocast's dtype, as nn.Linear would; its products stay as they are."""
    hidden, weight, kwargs = batch
    half = (hidden.half(), weight.half())
    with torch.autocast("cpu", torch.float16):
        ours = run(linear_grpo_loss, (hidden, weight), kwargs, "triton")
    plain, grads = run(linear_grpo_loss, half, kwargs, "triton")
    assert torch.equal(ours[0].loss, plain.loss)
    assert all(torch.equal(a, b.float()) for a, b in zip(ours[1], grads, strict=True))


def test_logits_are_overwritten_and_a_second_backward_is_refused(batch):
    hidden, weight, kwargs = batch
    given = (hidden @ weight.T).half().requires_grad_().clone()
    out = logits_grpo_loss(given, inplace=True, backend="triton", **kwargs)
    (grad,) = torch.autograd.grad(out.loss * 2, given, retain_graph=True)
    assert grad.data_ptr() == given.data_ptr() and grad.dtype == torch.float16
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.loss, given)


def test_logits_rows_past_2_to_the_31(batch):
    hidden, weight, kwargs = batch
    near = (hidden @ weight.T)[:3].half()
    far = torch.empty_strided((3, V), (2**30, 1), dtype=torch.float16).copy_(near)
    kwargs = {"targets": kwargs["targets"][:3], "advantages": torch.randn(3), "old_logps": kwargs["old_logps"][:3]}
    results = []
    for logits in (far, near):
        leaf = logits.requires_grad_()
        out = logits_grpo_loss(leaf, inplace=True, backend="triton", **kwargs)
        results.append((out, torch.autograd.grad(out.loss, leaf)))
    same(*results)


@pytest.mark.parametrize("name, chunk_rows, backend", [
    ("linear_grpo_loss", 8, "aot_eager"),
    slow("linear_grpo_loss", launch.CHUNK_ROWS, "aot_eager"),
    slow("linear_grpo_loss", launch.CHUNK_ROWS, "inductor"),  # lays out the results of operators anew
    slow("linear_grpo_loss", 8, "inductor"),
    slow("linear_logprob", 8, "aot_eager"),
    slow("logits_grpo_loss", 8, "aot_eager"),
    slow("grpo_loss", 8, "aot_eager"),
])  # fmt: skip
def test_torch_compile(name, chunk_rows, backend, batch, monkeypatch):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler on the CPU")
    several_chunks(monkeypatch, chunk_rows)
    hidden, weight, kwargs = batch
    kwargs |= {**OBJECTIVES["dapo"], "rows": torch.arange(0, N, 2), "backend": "triton"}
    targets = kwargs["targets"]
    rest = {key: value for key, value in kwargs.items() if key != "targets"}
    loss = {
        "linear_grpo_loss": lambda h, w: linear_grpo_loss(h * 1.5, w, **kwargs).loss * 3,
        "linear_logprob": lambda h, w: fastgrpo.linear_logprob(h, w, targets, backend="triton").sum(),
        "logits_grpo_loss": lambda h, w: logits_grpo_loss(h @ w.T, **kwargs).loss,
        "grpo_loss": lambda h, w: grpo_loss((h * w[targets]).sum(-1), **rest).loss,
    }[name]
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    eager, ours = (torch.autograd.grad(f(*leaves), leaves) for f in (loss, compiled))
    assert all(map(torch.equal, ours, eager))
