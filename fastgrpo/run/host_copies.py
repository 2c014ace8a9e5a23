r"""Copies of a run's tensors in host memory, made while its GPUs go on computing.

    the GPU's own stream    update of step n  ->  rollout, forward, backward of step n + 1  ->  update of step n + 1
    the stream of copies                      \\-> copies of step n's weights -----------------/

The stream of copies begins after the update that came before. The next update waits for the copies, on the GPU, and the
host waits for neither. The host does wait for all streams, so for the copies too, where the rollout records a CUDA
graph. The thread that writes a checkpoint waits for the copies before it reads them.
"""

import logging
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)


class HostCopies:
    """Makes the copies, one set of them at a time, and orders them before the update that follows.

    Copies of tensors on a GPU go into pinned memory, which is kept for the next set: to pin memory takes long, and what
    nobody holds is unpinned whenever torch records a CUDA graph. Other tensors are copied at once.
    """

    def __init__(self) -> None:
        self._streams = {}  # GPU -> the stream of its copies
        self._copied = {}  # GPU -> the event after the last copy of this set
        self._sources = []  # what is copied: its memory must not be given to others before
        self._free = defaultdict(list)  # dtype, shape and strides -> host memory that no set uses
        self._used = []  # the same of this set: pairs of key and memory
        self._pageable = 0  # bytes of new memory of this set that is not pinned
        self._obstacle = None  # why no more memory can be pinned

    def take(self, tree: Any) -> Any:
        """Copy every tensor of nested dicts and lists. One that occurs twice (tied weights) is copied once.

        The copies of tensors on a GPU are complete after `wait`. The set before must be complete. It stays as it is
        unless it has been released. Of a sharded tensor the part of this rank is copied, and the copy is sharded alike.
        """
        copies, started, could_pin = {}, set(), self._obstacle is None
        self._used, self._pageable = [], 0  # memory that is not released belongs to whoever reads it

        def copied(tensor):
            if isinstance(tensor, DTensor):
                return _like(tensor, copied(tensor.to_local()))
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in copies:
                copies[key] = self._copy(tensor.detach(), started)
            return copies[key]

        tree = _map(copied, tree)
        self._copied = {device: self._streams[device].record_event() for device in started}
        if could_pin and self._obstacle is not None:
            size = self._pageable >> 20
            logger.warning("%d MiB cannot be pinned, so checkpoints make the GPU wait (%s)", size, self._obstacle)
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
        self._sources.append(tensor)
        memory = self._memory(tensor)
        with torch.cuda.stream(self._streams[device]):
            return memory.copy_(tensor, non_blocking=True)

    def _memory(self, tensor):
        """Return host memory for a copy: free one of the same form, or new one, pinned as long as that works."""
        key = (tensor.dtype, tensor.shape, tensor.stride())
        memory = self._free[key].pop() if self._free[key] else None
        if memory is None and self._obstacle is None:
            try:
                memory = pinned_like(tensor)
            except RuntimeError as error:
                self._obstacle = str(error).partition("\n")[0]
        if memory is None:
            memory = torch.empty_like(tensor, device="cpu")
            self._pageable += tensor.nbytes
        self._used.append((key, memory))
        return memory

    def before_update(self, *_: Any) -> None:
        """Let each GPU finish the copies before what it is told to do from now on. The host does not wait."""
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait, on the host, until the copies are complete. Any thread may call it."""
        for event in self._copied.values():
            event.synchronize()
        self._sources.clear()

    def release(self) -> None:
        """Let the next set have the memory of this one, which is complete and read no more.

        Memory that this set had no use for is freed.
        """
        self._free.clear()
        for key, memory in self._used:
            self._free[key].append(memory)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor lies on a GPU."""
    return tensor.device.type == "cuda"


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate pinned memory for a copy.

    Returns:
        A tensor of its shape, dtype and strides on the host, with arbitrary values.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _like(sharded, local):
    """Make a sharded tensor of a part on the host. DTensor.from_local would move the part to the GPUs of the mesh."""
    names, context = sharded.__tensor_flatten__()
    inner = {name: getattr(sharded, name) for name in names} | {"_local_tensor": local}
    return DTensor.__tensor_unflatten__(inner, context, sharded.size(), sharded.stride()).detach()


def _map(function, tree):
    """Apply a function to every tensor of nested dicts and lists."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: _map(function, value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(function, value) for value in tree)
    return tree
