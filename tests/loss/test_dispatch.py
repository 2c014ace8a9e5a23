"""The check of a kernel's first use, with functions in place of kernels; tests/kernels/interpreted/ has the kernels."""

import logging
from unittest.mock import Mock

import pytest
import torch
import torch.utils.checkpoint

pytest.importorskip("triton")

from fastgrpo.kernels.objectives import PolicyRows
from fastgrpo.loss import dispatch

CPU = torch.device("cpu")
NAN = float("nan")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setenv(dispatch.VARIABLE, "1")


wrong = Mock(return_value="log-probs differ")
broken = Mock(side_effect=TypeError("no such instruction\nand a long listing"))
full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))


def refused():
    refusing = Mock(side_effect=RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation"))
    return dispatch.difference(head(), refusing, torch.randn(4, 16), True)


def test_triton_refuses_dtypes_that_its_kernels_do_not_support(monkeypatch):
    monkeypatch.setattr(dispatch.launch, "INTERPRET", True)
    monkeypatch.setattr(dispatch.launch, "runs_on", lambda device: True)
    monkeypatch.setattr(dispatch.launch, "HEAD_DTYPES", (torch.bfloat16,))
    tensors = {"hidden": torch.zeros(1, 1).half(), "weight": torch.zeros(1, 1).half()}
    with pytest.raises(ValueError, match=r"got hidden torch.float16; use backend='chunked'"):
        dispatch.choose_backend("triton", **tensors)


def test_a_variant_is_tried_once():
    tried = []
    for bias in (True, False, True):
        assert dispatch.trusted("head", CPU, {"bias": bias}, lambda: tried.append(0))
    assert len(tried) == 2


@pytest.mark.parametrize(("compare", "reason"), ((wrong, "log-probs differ"), (broken, "TypeError: no such")))
def test_a_failure_warns_once_and_stands_and_is_an_error_for_a_backend_by_name(compare, reason, caplog):
    with caplog.at_level(logging.WARNING, "fastgrpo"):
        assert not any(dispatch.trusted("head", CPU, {"dtype": "bf16"}, compare) for _ in range(3))
    (record,) = caplog.records
    for part in ("head", "dtype bf16", reason, torch.__version__, "doctor --check"):
        assert part in record.getMessage()
    assert dispatch.trusted("head", CPU, {"dtype": "fp16"}, lambda: None)  # another variant has its own verdict
    with pytest.raises(RuntimeError, match="Go without it"):
        dispatch.trusted("head", CPU, {}, compare, "Go without it.")


def test_environment_variable_controls_self_checks(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "0")
    assert dispatch.trusted("head", CPU, {}, broken)
    monkeypatch.setenv(dispatch.VARIABLE, "raise")
    with pytest.raises(RuntimeError, match="log-probs differ"):
        dispatch.trusted("head", CPU, {}, wrong)
    monkeypatch.delenv(dispatch.VARIABLE)
    assert dispatch.trusted("head", CPU, {}, broken)  # a CPU is not checked unless it is asked to
    monkeypatch.setenv(dispatch.VARIABLE, "yes")
    with pytest.raises(ValueError, match=dispatch.VARIABLE):
        dispatch.trusted("head", CPU, {}, wrong)


@pytest.mark.parametrize("compare", (full, refused))
def test_unfinished_self_checks_keep_the_kernel(compare, caplog):
    with caplog.at_level(logging.INFO, "fastgrpo"):
        assert dispatch.trusted("head", CPU, {}, compare, "Go without it.")
    assert "without a check" in caplog.records[0].getMessage()


def test_a_broken_context_ends_the_run(monkeypatch):
    def poisoned(*_):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", poisoned)
    with pytest.raises(RuntimeError, match="broke the CUDA context"):
        dispatch.trusted("head", torch.device("cuda"), {}, broken)
    assert not dispatch._verdicts


def head(scale=1.0, shift=0.0, rows=slice(0, 0)):
    """Return a way to a loss: log-probs of a fixed head, with a planted error in their gradient or their values."""
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))

    def way(states):
        logps = torch.log_softmax(states.float() @ weight.T, -1)[:, 3]
        off = torch.zeros(len(states))
        off[rows] = shift
        return logps.sum() * scale, {"logps": logps.detach() + off, "entropy": None}

    return way


@pytest.mark.parametrize("other, problem", [
    (head(scale=1.009), None),
    (head(scale=1.02), "gradients differ by 0.0"),
    (head(shift=4e-4, rows=slice(0, 200)), None),
    (head(shift=0.01, rows=slice(7, 9)), None),  # one row of a hundred may differ
    (head(shift=0.01, rows=slice(7, 10)), "logps differ in 3 of 200 rows"),
    (head(shift=NAN, rows=slice(0, 64)), "logps differ in 64 of 200 rows"),
    (head(scale=NAN), "gradients differ by inf of their norm"),
])  # fmt: skip
def test_difference_names_the_wrong_value(other, problem):
    states = torch.randn(200, 16)
    found = dispatch.difference(other, head(), states, True)
    assert found is None if problem is None else problem in found
    states[:50] = NAN  # on both paths: that proves nothing
    if problem is None or "gradients" in problem:
        assert (dispatch.difference(other, head(), states, True) is None) == (problem is None)


def rows(m, **fields):
    plain = {"targets": torch.arange(m), "temperature": 1.0, "advantages": torch.ones(m), "weights": torch.ones(m)}
    return PolicyRows(**{**dict.fromkeys(PolicyRows._fields), **plain, **fields})


def test_a_sample_is_the_first_kept_rows():
    states, index = torch.randn(1000, 4), torch.arange(0, 1000, 2)
    sample, kept = dispatch.sample_of(states, rows(500, index=index))
    assert torch.equal(sample, states[index[:256]]) and kept.index is None and len(kept.targets) == 256
    active = torch.arange(500) % 3 > 0
    sample, kept = dispatch.sample_of(states, rows(500, index=index, active=active))
    assert torch.equal(sample, states[index[:256]] * active[:256, None]) and kept.active is None
    assert kept.advantages[:3].tolist() == [1, -1, 1] and kept.weights.eq(1).all()  # every row has a gradient


def test_a_sample_holds_whole_sequences_where_the_objective_looks_at_them():
    lengths = (100, 100, 300, 20)
    given = rows(520, lengths=torch.tensor(lengths), host_lengths=lengths)
    sample, kept = dispatch.sample_of(torch.randn(520, 4), given)
    assert len(sample) == len(kept.targets) == 500
    assert kept.lengths.tolist() == [100, 100, 300] and kept.host_lengths == (100, 100, 300)
    with pytest.raises(dispatch.Unchecked, match="5000 tokens"):
        dispatch.sample_of(torch.randn(5000, 4), rows(5000, lengths=torch.tensor([5000])))


def test_self_checks_ignore_the_callers_autograd_modes():
    def compare():
        states = torch.ones(3, requires_grad=True)
        (grad,) = torch.autograd.grad(states.square().sum(), states)
        return None if grad.eq(2).all() else "wrong"

    for context in (torch.inference_mode, torch.no_grad):
        with context():
            assert dispatch.trusted("head", CPU, {"in": context.__name__}, compare)

    def region(x):
        assert dispatch.trusted("head", CPU, {"in": "checkpoint"}, compare)
        return x.square().sin()

    x = torch.ones(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False).sum().backward()
    assert x.grad is not None and set(dispatch._verdicts.values()) == {True}
