"""Copies of a run's tensors in host memory, made while its GPUs go on computing.

    the GPU's own stream    update of step n  ->  rollout, forward, backward of step n + 1  ->  update of step n + 1
    the stream of copies                      \\-> copies of step n's weights -----------------/

The stream of copies begins after the update that came before. The next update waits for the copies, on the GPU: the
host waits for neither. The thread that writes a checkpoint waits for the copies before it reads them.
"""

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


class HostCopies:
    """Makes the copies, one set of them at a time, and orders them before the update that follows.

    Copies of tensors on a GPU go into pinned memory, which torch keeps for the next set. Other tensors are copied at
    once.
    """

    def __init__(self) -> None:
        self._streams = {}  # GPU -> the stream of its copies
        self._copied = {}  # GPU -> the event after the last copy of this set
        self._sources = []  # what is copied: its memory must not be given to others before

    def take(self, tree: Any) -> Any:
        """Copy every tensor of nested dicts and lists. One that occurs twice (tied weights) is copied once.

        The copies of tensors on a GPU are complete after `wait`. The set before must be complete.

        Args:
            tree: The dicts, lists and tensors.

        Returns:
            The same tree with the copies.
        """
        copies, started = {}, set()

        def copied(tensor):
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in copies:
                self._sources.append(tensor)
                copies[key] = self._copy(tensor.detach(), started)
            return copies[key]

        tree = _map(copied, tree)
        self._copied = {device: self._streams[device].record_event() for device in started}
        return tree

    def _copy(self, tensor, started):
        """Copy a tensor. `started` holds the GPUs whose stream of copies has waited for the work before the set."""
        device = tensor.device
        if not on_gpu(tensor):
            return tensor.to("cpu", copy=True)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        if device not in started:
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
            started.add(device)
        with torch.cuda.stream(self._streams[device]):
            return pinned_like(tensor).copy_(tensor, non_blocking=True)

    def before_update(self, *_: Any) -> None:
        """Let each GPU finish the copies before what it is told to do from now on. The host does not wait.

        Args:
            _: What torch passes to a hook of an optimizer, which is not read.
        """
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait, on the host, until the copies are complete. Any thread may call it."""
        for event in self._copied.values():
            event.synchronize()
        self._sources.clear()


def on_gpu(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor lies on a GPU.

    Args:
        tensor: The tensor.

    Returns:
        Whether its device is a CUDA device.
    """
    return tensor.device.type == "cuda"


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate pinned memory for a copy.

    Where the system has none left to pin, this says so and takes pageable memory: the copy is right, and the host waits
    for it.

    Args:
        tensor: The tensor that will be copied.

    Returns:
        A tensor of its shape, dtype and strides on the host, with arbitrary values.
    """
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        logger.warning("%d MiB cannot be pinned, so a checkpoint makes the GPU wait (%s)", tensor.nbytes >> 20, reason)
        return torch.empty_like(tensor, device="cpu")


def _map(function, tree):
    """Apply a function to every tensor of nested dicts and lists."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: _map(function, value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(function, value) for value in tree)
    return tree
