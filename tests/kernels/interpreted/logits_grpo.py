"""The loss of given logits on the CPU: in place and into a new tensor, masked rows, and torch.compile.

This file mirrors logits_grpo and logits_rows.

Run by test_interpreted.py, in a process with TRITON_INTERPRET=1.
"""

import math

import pytest
import torch
from loss_runs import OBJECTIVES, N, V, check_compiled, device_only_mask, run, same

import fastgrpo.loss.losses
from benchmarks import liger_cases
from fastgrpo import logits_grpo_loss
from fastgrpo.integrations.liger import LigerFusedLinearGRPOLoss, triton_grpo_loss


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


@pytest.mark.parametrize("known_to", ("host", "device"))
def test_a_batch_without_a_kept_row(known_to, batch, monkeypatch):
    hidden, weight, kwargs = batch
    kwargs["mask"] = torch.zeros(N, dtype=torch.bool)
    if known_to == "device":
        device_only_mask(monkeypatch)
    out, grads = run(logits_grpo_loss, (hidden @ weight.T,), kwargs, "triton")
    assert out.loss == 0 and not out.active.any() and (out.logps == 0).all()
    assert (grads[0] == 0).all() and all(v == 0 for v in out.metrics.values())


def test_torch_compile(batch):
    hidden, weight, kwargs = batch
    kwargs["rows"] = torch.arange(0, N, 2)

    def loss(hidden, weight):
        return logits_grpo_loss(hidden @ weight.T, backend="triton", **kwargs).loss

    check_compiled(loss, hidden, weight, "aot_eager")


@pytest.mark.parametrize(
    "name", ("dapo-corrected", "cispo-low-cap-plain", "grpo-sequence-ratio-k3", "vespo-flat-ratio-first-update")
)
def test_the_losses_under_liger_s_names(name, monkeypatch):
    """What a GPU would run, where the host does not learn which tokens carry gradient."""
    monkeypatch.setattr(fastgrpo.loss.losses, "choose_backend", lambda *args, **tensors: "triton")
    device_only_mask(monkeypatch)
    knobs, options = liger_cases.CASES[name]
    p = liger_cases.batch(**options)
    runs = [liger_cases.run_class(LigerFusedLinearGRPOLoss, p, knobs)]
    runs += [liger_cases.run_function(triton_grpo_loss, p, knobs, inplace=inplace) for inplace in (False, True)]
    assert all(liger_cases.gap(run, liger_cases.truth(p, knobs)) <= liger_cases.CLOSE for run in runs)
