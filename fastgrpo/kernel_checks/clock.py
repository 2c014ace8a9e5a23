"""The time of a kernel beside that of plain PyTorch, and what the device can do at most."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

ROUNDS = 10
L2_BYTES = 256 * 2**20  # more than the L2 cache of any GPU: zeroing so much evicts what the call before left there
HEAD_STARTS = 8  # zeroings before a call, during which the host launches the call's first kernels
COPIED_BYTES = 2**29
PRODUCT = 8192  # rows and columns of the square product that shows what the device's products reach


def seconds_of(call: Callable[[], Any], device: torch.device, cache: torch.Tensor | None = None) -> float:
    """Time one call: on a GPU between two events with a cold L2 cache, on a CPU by the clock on the wall."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    for _ in range(HEAD_STARTS):
        cache.zero_()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def medians(calls: dict[str, Callable[[], Any]], device: torch.device, rounds: int = ROUNDS) -> dict[str, float]:
    """Time several calls in turns, after one call of each that warms up."""
    cache = torch.empty(L2_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    times = {}
    for name, call in calls.items():
        try:
            call()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        times[name] = []
    for i in range(rounds):
        names = list(times)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(seconds_of(calls[name], device, cache))
    return {name: median(values) for name, values in times.items()}


def copy_limit(device: torch.device) -> float:
    """Return the bytes a second that a large copy reads and writes."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / medians({"copy": lambda: target.copy_(source)}, device)["copy"]


def product_limit(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second that a large square product does."""
    left = torch.randn(PRODUCT, PRODUCT, device=device).to(dtype)
    return 2 * PRODUCT**3 / medians({"product": lambda: left @ left}, device)["product"]
