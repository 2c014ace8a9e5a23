"""The self-check of fastgrpo/loss/dispatch.py with real kernels: right ones pass, planted errors are caught."""

import logging

import pytest
import torch
from loss_runs import OBJECTIVES, device_only_mask, run, same

from fastgrpo import grpo_loss, linear_grpo_loss, linear_logprob, logits_grpo_loss
from fastgrpo.kernels import head as head_kernels
from fastgrpo.kernels import logits as logits_kernels
from fastgrpo.loss import dispatch


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """A call that asks for no backend by name takes the kernels."""
    monkeypatch.setattr(dispatch, "_fits", lambda *_: True)
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setenv(dispatch.VARIABLE, "1")


def call(name, batch):
    hidden, weight, kwargs = batch
    if name == "linear_grpo_loss":
        return linear_grpo_loss, (hidden, weight), kwargs
    logits = hidden @ weight.T
    if name == "logits_grpo_loss":
        return logits_grpo_loss, (logits,), {**kwargs, "inplace": True}
    logps = torch.log_softmax(logits, -1).gather(1, kwargs["targets"][:, None])[:, 0]
    return grpo_loss, (logps,), {name: value for name, value in kwargs.items() if name != "targets"}


NAMES = ("linear_grpo_loss", "logits_grpo_loss", "grpo_loss")


@pytest.mark.parametrize("objective", ["gspo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bonus", "vespo"))])
def test_right_kernels_pass(objective, batch, monkeypatch):
    device_only_mask(monkeypatch)
    for name in NAMES:
        function, tensors, kwargs = call(name, batch)
        if name == "grpo_loss" and objective == "bonus":
            continue  # it has no entropy
        run(function, tensors, {**kwargs, **OBJECTIVES[objective]}, "auto")
    assert set(dispatch._verdicts.values()) == {True}
    assert {kernel for kernel, *_ in dispatch._verdicts} >= {"linear_grpo_loss", "logits_grpo_loss"}


def spoil(monkeypatch, name):
    """Plant an error in the kernels of a loss: sums without one vocabulary tile, or a launch that fails."""
    if name == "linear_grpo_loss":
        original = head_kernels.linear_exp_fwd

        def lacks_a_tile(*args, **kwargs):
            sums = original(*args, **kwargs)
            if sums[0] is not None:
                sums[0][1] = 0
            return sums

        monkeypatch.setattr(head_kernels, "linear_exp_fwd", lacks_a_tile)
    else:

        class Refusing:
            def __getitem__(self, grid):
                raise RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448")

        monkeypatch.setattr(logits_kernels, "_logits_grpo_fwd_kernel", Refusing())


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_planted_error_is_caught_and_worked_around(name, batch, monkeypatch, caplog):
    function, tensors, kwargs = call(name, batch)
    expected = run(function, tensors, kwargs, "chunked")
    spoil(monkeypatch, name)
    device_only_mask(monkeypatch)
    with caplog.at_level(logging.WARNING, "fastgrpo"):
        same(run(function, tensors, kwargs, "auto"), expected)
        same(run(function, tensors, kwargs, "auto"), expected)
    assert [f"the kernel of {name} failed its check" in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(RuntimeError, match="failed its check"):
        dispatch._verdicts.clear()
        run(function, tensors, kwargs, "triton")


def test_log_probs(batch, monkeypatch, caplog):
    hidden, weight, kwargs = batch
    expected = linear_logprob(hidden, weight, kwargs["targets"], backend="chunked")
    for entropy in (False, True):
        linear_logprob(hidden.clone().requires_grad_(), weight, kwargs["targets"], return_entropy=entropy)
    assert list(dispatch._verdicts.values()) == [True, True]
    dispatch._verdicts.clear()
    spoil(monkeypatch, "linear_grpo_loss")
    with caplog.at_level(logging.WARNING, "fastgrpo"):
        ours = linear_logprob(hidden, weight, kwargs["targets"])
    assert torch.equal(ours, expected) and "the kernel of linear_logprob failed" in caplog.records[0].getMessage()
