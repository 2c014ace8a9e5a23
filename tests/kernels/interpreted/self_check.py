"""The self-check of fastgrpo/loss/dispatch.py with real kernels: right ones pass, planted errors are caught.

A call that asks for no backend by name takes the kernels here, as it does on a GPU. Run by test_interpreted.py, in a
process with TRITON_INTERPRET=1.
"""

import logging

import pytest
import tiny
import torch
from loss_runs import OBJECTIVES, D, V, device_only_mask, run, same
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastgrpo import grpo_loss, linear_grpo_loss, linear_logprob, logits_grpo_loss
from fastgrpo.kernels import head as head_kernels
from fastgrpo.kernels import logits as logits_kernels
from fastgrpo.kernels.head_torch import CAST_BYTES
from fastgrpo.loss import dispatch


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "_fits", lambda *_: True)
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setenv(dispatch.VARIABLE, "1")


def call(name, batch):
    """Return the function, its tensors and its keyword arguments."""
    hidden, weight, kwargs = batch
    if name == "linear_grpo_loss":
        return linear_grpo_loss, (hidden, weight), kwargs
    logits = hidden @ weight.T
    if name == "logits_grpo_loss":
        return logits_grpo_loss, (logits,), {**kwargs, "inplace": True}
    logps = torch.log_softmax(logits, -1).gather(1, kwargs["targets"][:, None])[:, 0]
    return grpo_loss, (logps,), {name: value for name, value in kwargs.items() if name != "targets"}


NAMES = ("linear_grpo_loss", "logits_grpo_loss", "grpo_loss")


@pytest.mark.parametrize("objective", OBJECTIVES)
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
    """Plant an error in the kernels of a loss: values that are off by 1%, or sums without one vocabulary tile."""
    if name == "linear_grpo_loss":
        original = head_kernels.linear_exp_fwd

        def lacks_a_tile(*args, **kwargs):
            sums = original(*args, **kwargs)
            if sums[0] is not None:
                sums[0][1] = 0
            return sums

        monkeypatch.setattr(head_kernels, "linear_exp_fwd", lacks_a_tile)
    elif name == "logits_grpo_loss":
        original = logits_kernels._logits_grpo_fwd_kernel
        monkeypatch.setattr(logits_kernels, "_logits_grpo_fwd_kernel", Refusing(original))
    else:
        original = logits_kernels.policy_loss_fwd

        def off(logps, rows, objective):
            loss, g, metrics = original(logps, rows, objective)
            return loss, g * 1.02, metrics

        monkeypatch.setattr(logits_kernels, "policy_loss_fwd", off)


class Refusing:
    """A kernel whose launch fails as one does that wants more shared memory than the GPU has."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            raise RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448")

        return launch


@pytest.mark.parametrize("name", NAMES)
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


def test_what_a_sample_may_hold(batch, monkeypatch):
    """Rows of every kind that a healthy kernel computes rightly must not speak against it."""
    hidden, weight, kwargs = batch
    cases = {
        "a large step": ({"num_items_in_batch": 300_000}, torch.float16),
        "advantages of 0": ({"advantages": torch.zeros(6)}, torch.float32),
        "no rows": ({"rows": torch.tensor([], dtype=torch.int64)}, torch.float32),
    }
    for case, (more, dtype) in cases.items():
        if case == "advantages of 0":
            device_only_mask(monkeypatch)
        dispatch._verdicts.clear()
        tensors = [x.to(dtype) for x in (hidden, weight)]
        run(linear_grpo_loss, tensors, {**kwargs, **more}, "triton")
        assert list(dispatch._verdicts.values()) == ([] if case == "no rows" else [True]), case
    linear_logprob(hidden[:0], weight, kwargs["targets"][:0], backend="triton")


def test_a_loss_in_a_checkpointed_region(batch):
    hidden, weight, kwargs = batch

    def region(hidden, weight):
        return linear_grpo_loss(hidden, weight, backend="triton", **kwargs).loss

    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    checkpoint(region, *leaves, use_reentrant=False).backward()
    _, expected = run(linear_grpo_loss, (hidden, weight), kwargs, "chunked")
    assert list(dispatch._verdicts.values()) == [True]
    for leaf, grad in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-4, atol=1e-6)


class Counting(TorchDispatchMode):
    """Counts the operators that run, each of which is a launch or a few on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def count(function):
    with Counting() as counting:
        function()
    return counting.count


def test_the_checks_of_a_run_are_one_percent_of_it_at_most(batch):
    """Six checks (the loss, log-probs in two forms, the reference's, decoding, draws) against 200 steps.

    The smallest of models has two layers, and a step has at least one pass forward and back and one call of the loss;
    the rollout is not even counted.
    """
    function, tensors, kwargs = call("linear_grpo_loss", batch)
    first, second = (count(lambda: run(function, tensors, kwargs, "auto")) for _ in range(2))
    model, ids = tiny.model("qwen2"), torch.randint(3, 60, (1, 8))
    layers = count(lambda: model.model(ids).last_hidden_state.sum().backward())
    # one block of the weight; a larger vocabulary comes with more layers than two
    assert 4 * V * D <= CAST_BYTES
    assert 0 < 6 * (first - second) < 0.01 * 200 * (second + layers)
