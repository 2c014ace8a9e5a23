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
    """Check that a value is a tensor of one kind of numbers.

    Args:
        value: What the caller gave.
        name: What errors call it.
        kind: A key of `KINDS`.
        like: A tensor on the device on which the value must be, or None for any device.
        like_name: What errors call `like`.

    Raises:
        ValueError: The value is no tensor, of another kind, or on another device.
    """
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    if not KINDS[kind](value.dtype):
        raise ValueError(f"{name} must be {kind}, got {value.dtype}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like {like_name}, got {value.device}")


def check_constant(value: Any, name: str, kind: str, tokens: torch.Tensor) -> None:
    """Check a tensor by which the loss is not differentiated.

    Args:
        value: What the caller gave.
        name: What errors call it.
        kind: A key of `KINDS`.
        tokens: Any tensor on the device of the tokens.

    Raises:
        ValueError: The value is no tensor of this kind on the device of the tokens, or requires grad.
    """
    check_tensor(value, name, kind, tokens, "the tokens")
    if value.requires_grad:
        raise ValueError(f"{name} must not require grad: the loss differentiates by the policy alone; detach it")


def check_number(value: Any, name: str, interval: Interval) -> None:
    """Check a number of the host.

    Args:
        value: What the caller gave.
        name: What errors call it.
        interval: Its range.

    Raises:
        ValueError: The value is no number of the range.
    """
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

    Raises:
        ValueError: A number on the CPU breaks the rule.
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

    Raises:
        ValueError: A target on the CPU lies outside [0, V).
    """
    rule = f"be in [0, {vocab_size}) on active rows"
    check_numbers(targets, "targets", rule, lambda ids: (ids >= 0) & (ids < vocab_size), index)


def check_temperature(temperature: Any, tokens: torch.Tensor) -> None:
    """Check a temperature, but for the numbers of a tensor: `check_temperatures` looks at those that are used.

    Args:
        temperature: A float or a tensor.
        tokens: Any tensor on the device of the tokens.

    Raises:
        ValueError: A float is outside of `TEMPERATURE`; a tensor has the wrong kind or device, or requires grad.
    """
    if isinstance(temperature, torch.Tensor):
        check_constant(temperature, "temperature", "real numbers", tokens)
    else:
        check_number(temperature, "temperature", TEMPERATURE)


def check_temperatures(temperatures: torch.Tensor, index: torch.Tensor | None = None) -> None:
    """Check the numbers of a temperature per token.

    Args:
        temperatures: [M], those of active rows.
        index: [M] their places among all tokens, or None where all rows are active.

    Raises:
        ValueError: One on the CPU is outside of `TEMPERATURE`.
    """
    lowest = TEMPERATURE.at_least
    rule = f"be finite and {TEMPERATURE.text} on active rows"
    check_numbers(temperatures, "temperature", rule, lambda ts: ts.isfinite() & (ts >= lowest), index)
