"""A frozen model that rests in host memory and passes through the device layer by layer while it runs.

Two buffers on the device take turns: while one layer computes in the first, the next one is copied into the second, on
a stream of its own. On a CPU the same code copies from buffer to buffer; it serves tests.
"""

from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

ALIGNMENT = 256  # bytes, as the allocator of CUDA gives them


class PackedWeights:
    """Parameters side by side in one host buffer, pinned for a GPU, so that one copy moves them all."""

    def __init__(self, parameters, pin):
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
    def view(buffer, parameter, place):
        return buffer[place].view(parameter.dtype).view(parameter.shape)

    def attach(self, buffer):
        """The parameters' values are read from this buffer from now on."""
        for parameter, place in zip(self.parameters, self.places, strict=True):
            parameter.data = self.view(buffer, parameter, place)


class LayerStream:
    """Runs `model` on `device`, with room there for what is no layer (embedding, norm, head) and for two layers, and
    that only inside of `ready`.
    """

    def __init__(self, model, device):
        """model: frozen, its parameters on the CPU, its buffers on the device."""
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
    def ready(self):
        """Inside, the model computes on the device; afterwards nothing of it is there."""
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
            if self.on_gpu:  # the buffers' memory may be given to others only when the last copy is done
                torch.cuda.current_stream(self.device).wait_stream(self.copies)
            for weights in (self.rest, *self.layers):
                weights.attach(weights.host)
            self.buffers = self.coming = None

    def _fetch(self, i):
        """Start to copy layer i into the buffer whose turn it is."""
        self.turn = 1 - self.turn
        host = self.layers[i].host
        if self.on_gpu:  # until the layer that lies there has run
            self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies) if self.on_gpu else nullcontext():
            self.buffers[self.turn][: len(host)].copy_(host, non_blocking=True)
            self.arrived = self.copies.record_event() if self.on_gpu else None
        self.coming = i

    def _enter(self, i, *_):
        """Before layer i runs: wait for it, and start on the next one (behind the last, the first)."""
        if self.coming != i:
            raise RuntimeError(f"layer {i} runs, but layer {self.coming} was fetched: the layers must run in order")
        if self.on_gpu:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        self.layers[i].attach(self.buffers[self.turn])
        self._fetch((i + 1) % len(self.layers))
