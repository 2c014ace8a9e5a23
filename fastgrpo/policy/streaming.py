"""A frozen model that rests in host memory and whose layers pass through the device one by one while it runs.

Two buffers on the device take turns: while one layer computes from the first buffer, the next layer is copied into the
second one on a stream of its own. On a CPU the same code copies from buffer to buffer, which only serves tests.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

ALIGNMENT = 256  # bytes: CUDA's allocator aligns tensors to as many


class PackedWeights:
    """Parameters that lie side by side in one host buffer, so that one copy moves them all."""

    def __init__(self, parameters: list[torch.nn.Parameter], pin: bool) -> None:
        self.parameters, self.places, size = parameters, [], 0
        for parameter in parameters:
            length = parameter.numel() * parameter.element_size()
            self.places.append(slice(size, size + length))
            size += -(-length // ALIGNMENT) * ALIGNMENT
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        for parameter, place in zip(parameters, self.places, strict=True):
            self.view(self.host, parameter, place).copy_(parameter.data)
        self.attach(self.host)

    @staticmethod
    def view(buffer: torch.Tensor, parameter: torch.nn.Parameter, place: slice) -> torch.Tensor:
        """View the bytes of one parameter in a buffer as that parameter.

        Args:
            buffer: uint8, one-dimensional.
            parameter: The parameter, which gives dtype and shape.
            place: The bytes of the parameter in the buffer.
        """
        return buffer[place].view(parameter.dtype).view(parameter.shape)

    def attach(self, buffer: torch.Tensor) -> None:
        """Make the parameters views of another buffer that holds the same bytes."""
        for parameter, place in zip(self.parameters, self.places, strict=True):
            parameter.data = self.view(buffer, parameter, place)


class LayerStream:
    """Runs a frozen model on a device that holds two of its layers at a time.

    The device also holds the parameters outside the layers (embedding, norm, head). It holds all of this only while
    `ready` is open.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        modules = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        inside = {id(parameter) for module in modules for parameter in module.parameters()}
        self.rest = PackedWeights([p for p in model.parameters() if id(p) not in inside], self.on_gpu)
        self.layers = [PackedWeights(list(module.parameters()), self.on_gpu) for module in modules]
        for i, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._enter, i))
        self.copies = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.buffers, self.turn, self.coming, self.arrived = None, 0, None, None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let the model compute on the device while the context manager is open; afterwards the device is freed."""
        size = max(len(layer.host) for layer in self.layers)
        empty = partial(torch.empty, dtype=torch.uint8, device=self.device)
        self.buffers = [empty(size), empty(size)]
        rest = empty(len(self.rest.host))
        rest.copy_(self.rest.host, non_blocking=True)
        self.rest.attach(rest)
        self._fetch(0)
        try:
            yield
        finally:
            if self.on_gpu:  # the last copy must be done before the buffers' memory can be given to other tensors
                torch.cuda.current_stream(self.device).wait_stream(self.copies)
            for weights in (self.rest, *self.layers):
                weights.attach(weights.host)
            self.buffers = self.coming = None

    def _fetch(self, i):
        """Start to copy layer i into the buffer that is not in use."""
        self.turn = 1 - self.turn
        host = self.layers[i].host
        if self.on_gpu:  # the copy waits until the layer that lies in this buffer has run
            self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies) if self.on_gpu else nullcontext():
            self.buffers[self.turn][: len(host)].copy_(host, non_blocking=True)
            self.arrived = self.copies.record_event() if self.on_gpu else None
        self.coming = i

    def _enter(self, i, *_):
        """Wait for layer i, which is about to run, and start to copy the next one (after the last, the first)."""
        if self.coming != i:
            raise RuntimeError(
                f"layer {i} runs, but layer {self.coming} was fetched: the layers of a streamed model must run in order"
            )
        if self.on_gpu:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        self.layers[i].attach(self.buffers[self.turn])
        self._fetch((i + 1) % len(self.layers))
