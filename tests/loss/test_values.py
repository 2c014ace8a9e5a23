"""Numbers are looked at on the CPU, asserted by a device in anomaly mode, and left alone everywhere else."""

import math

import pytest
import torch

from fastgrpo.loss import values
from fastgrpo.loss.interval import Interval
from fastgrpo.loss.values import assert_numbers, check_number, check_numbers, check_targets, check_tensor

N, V = 12, 40


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ([1.0], "real numbers", "x must be a tensor, got list"),
        (None, "real numbers", "x must be a tensor, got NoneType"),
        (torch.ones(2), "integers", "x must be integers, got torch.float32"),
        (torch.ones(2).bool(), "integers", "x must be integers, got torch.bool"),
        (torch.ones(2).bool(), "real numbers", "x must be real numbers, got torch.bool"),
        (torch.ones(2) * 1j, "real numbers", "x must be real numbers, got torch.complex64"),
        (torch.ones(2) * 1j, "floating point", "x must be floating point, got torch.complex64"),
        (torch.ones(2) * 1j, "real numbers or bools", "x must be real numbers or bools, got torch.complex64"),
        (torch.ones(2, device="meta"), "real numbers", "x must be on cpu like y, got meta"),
    ],
)
def test_tensors_of_the_wrong_kind_or_device(value, kind, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_tensor(value, "x", kind, torch.ones(1), "y")


def test_the_first_broken_number_is_named_with_its_index():
    numbers = torch.tensor([[1.0, 2.0], [-3.0, math.nan]])
    with pytest.raises(ValueError, match=r"^x must be at least 0, got -3\.0 at index 2$"):
        check_numbers(numbers, "x", "be at least 0", lambda x: x >= 0)
    with pytest.raises(ValueError, match=r"got -3\.0 at index 7$"):
        check_numbers(numbers, "x", "be at least 0", lambda x: x >= 0, torch.tensor([[1, 5], [7, 9]]))
    check_numbers(numbers[:1], "x", "be at least 0", lambda x: x >= 0)


def test_the_host_looks_at_no_device_but_in_anomaly_mode_the_device_asserts(monkeypatch):
    asserted = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, message: asserted.append((condition.shape, message)))
    targets = torch.zeros(N, dtype=torch.long, device="meta")
    check_targets(targets, V)
    assert asserted == []
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        check_targets(targets, V)
    assert asserted == [(torch.Size([]), f"targets must be in [0, {V}) on active rows")]


def test_what_anomaly_mode_asserts():
    assert_numbers(torch.ones(3), "x", "be finite", torch.isfinite)
    with pytest.raises(RuntimeError, match="x must be finite"):
        assert_numbers(torch.tensor([0.0, math.inf]), "x", "be finite", torch.isfinite)


@pytest.mark.parametrize("bad", [V, -1, -100])
def test_targets_outside_of_the_vocabulary(bad):
    check_targets(torch.tensor([0, V - 1]), V)
    with pytest.raises(ValueError, match=rf"targets must be in \[0, {V}\) on active rows, got {bad} at index 1"):
        check_targets(torch.tensor([0, bad]), V)


def test_a_compiled_graph_looks_at_nothing(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    check_numbers(torch.tensor([math.nan]), "x", "be finite", torch.isfinite)
    check_number(math.nan, "x", Interval())


@pytest.mark.parametrize("temperature", [1e-30, 0.7, 1e30])
def test_logits_of_ordinary_size_stay_finite_at_every_legal_temperature(temperature):
    """The lower bound is made for it: at 1e-31 logits of 1e8 are infinite in fp32."""
    values.check_temperature(temperature, torch.ones(1))
    values.check_temperatures(torch.tensor([temperature]))
    assert (torch.tensor([1e8, -1e8]) / temperature).isfinite().all()
    assert (torch.tensor(1e8) / 1e-31).isinf()
