"""Checks of a tensor that a caller gives: that it is one, of the right kind and device, and what numbers it holds.

Numbers are looked at where that is free: on the CPU. On a GPU the host would have to wait for the device, so there the
device asserts them, under torch's anomaly mode alone. Inside of a graph of torch.compile nothing can raise an error, so
nobody looks there.
"""

from collections.abc import Callable
from typing import Any

import torch

from fastgrpo.loss.interval import TEMPERATURE, Interval

# kind of a tensor, as an error calls it -> whether a dtype is of that kind
KINDS = {
    "floating point": lambda dtype: dtype.is_floating_point,
    "integers": lambda dtype: not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool),
    "real numbers": lambda dtype: not (dtype.is_complex or dtype == torch.bool),
    "real numbers or bools": lambda dtype: not dtype.is_complex,
}


def check_tensor(value: Any, name: str, kind: str, like: torch.Tensor | None = None, like_name: str = "") -> None:
    """Check that a value is a tensor of one kind of numbers."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    if not KINDS[kind](value.dtype):
        raise ValueError(f"{name} must be {kind}, got {value.dtype}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like {like_name}, got {value.device}")


def check_constant(value: Any, name: str, kind: str, tokens: torch.Tensor) -> None:
    """Check a tensor by which the loss is not differentiated."""
    check_tensor(value, name, kind, tokens, "the tokens")
    if value.requires_grad:
        raise ValueError(f"{name} must not require grad: the loss differentiates by the policy alone; detach it")


def check_number(value: Any, name: str, interval: Interval) -> None:
    """Check a number of the host."""
    if not torch.compiler.is_compiling():
        interval.check(name, value)


def check_numbers(
    values: torch.Tensor, name: str, rule: str, legal: Callable[[torch.Tensor], torch.Tensor],
    index: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Check the numbers of a tensor, unless the host would have to wait for a GPU.

    Args:
        values: [...] numbers.
        name: What errors call them.
        rule: The rule in words that follow "must".
        legal: Tells for each number, [...] bool, whether it keeps the rule.
        index: [...] places of the numbers in what the caller gave, or None where `values` are all of that.
    """
    if not values.numel() or torch.compiler.is_compiling():
        return
    if _host_looks(values):
        kept = legal(values)
        if not kept.all():
            first = (~kept).flatten().nonzero()[0, 0]
            place = first if index is None else index.flatten()[first]
            raise ValueError(f"{name} must {rule}, got {values.flatten()[first].item()} at index {place.item()}")
    elif torch.is_anomaly_enabled():
        assert_numbers(values, name, rule, legal)


def _host_looks(values):
    """Whether the host can look at numbers without waiting for a device."""
    return values.device.type == "cpu"


def assert_numbers(values: torch.Tensor, name: str, rule: str, legal: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let the device assert the numbers of a tensor. The host does not wait, so a later call raises.

    Args:
        values: [...] numbers.
        name: What the error calls them.
        rule: The rule in words that follow "must".
        legal: Tells for each number, [...] bool, whether it keeps the rule.
    """
    torch._assert_async(legal(values).all(), f"{name} must {rule}")


def check_targets(targets: torch.Tensor, vocab_size: int, index: torch.Tensor | None = None) -> None:
    """Check that the targets of active rows are in the vocabulary. On a GPU the kernels return NaN for a bad target.

    Args:
        targets: [M] token ids of the active rows.
        vocab_size: V.
        index: [M] their places among all tokens, or None where all rows are active.
    """
    rule = f"be in [0, {vocab_size}) on active rows"
    check_numbers(targets, "targets", rule, lambda ids: (ids >= 0) & (ids < vocab_size), index)


def check_temperature(temperature: Any, tokens: torch.Tensor) -> None:
    """Check a temperature, but for the numbers of a tensor: `check_temperatures` looks at those that are used."""
    if isinstance(temperature, torch.Tensor):
        check_constant(temperature, "temperature", "real numbers", tokens)
    else:
        check_number(temperature, "temperature", TEMPERATURE)


def check_temperatures(temperatures: torch.Tensor, index: torch.Tensor | None = None) -> None:
    """Check the numbers of a temperature per token.

    Args:
        temperatures: [M], those of active rows.
        index: [M] their places among all tokens, or None where all rows are active.
    """
    lowest = TEMPERATURE.at_least
    rule = f"be finite and {TEMPERATURE.text} on active rows"
    check_numbers(temperatures, "temperature", rule, lambda ts: ts.isfinite() & (ts >= lowest), index)
