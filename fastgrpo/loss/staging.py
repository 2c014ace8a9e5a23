"""Copies from the host to a GPU that the host does not wait for.

CUDA copies asynchronously only from pinned memory; from pageable memory it may wait for everything that the stream has
still to do, once a copy is larger than 64 KiB. torch's allocator of pinned memory gives a block out again only after
the stream has done the copy, so nobody needs to keep the pinned tensor.
"""

import torch


def staged(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Put a tensor of the host into pinned memory where it will be copied to a GPU."""
    to_gpu = value.device.type == "cpu" and torch.device(device).type == "cuda"
    if not to_gpu or not value.numel() or torch.compiler.is_compiling():
        return value
    return value.contiguous().pin_memory()


def to_device(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Move a tensor without waiting for the device."""
    return staged(value, device).to(device, non_blocking=True)
