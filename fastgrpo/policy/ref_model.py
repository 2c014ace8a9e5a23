"""The reference policy of the KL term.

It is the policy without its adapters, or a frozen copy of the initial policy. The copy is on the device; or in host
memory, with its layers streamed to the device one by one; or it is quantized. At beta = 0 there is no reference.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.lora import adapters_off, has_adapters
from fastgrpo.policy.micro_batches import micro_batches
from fastgrpo.policy.model import HeadWeights, Policy, decoder_layers
from fastgrpo.policy.quantized import quantize
from fastgrpo.policy.shard import local
from fastgrpo.ranks import ALONE, Ranks


class Scoring(NamedTuple):
    """Settings for scoring samples: temperature and micro-batches."""

    temperature: float
    max_tokens: int
    share_prompt: bool = True


@torch.no_grad()
def score(
    policy: Policy,
    samples: Sequence[Sample],
    scoring: Scoring,
    passes: int | None = None,
    compute: Callable[[Policy, Batch, float], torch.Tensor] = Policy.logps,
) -> list[torch.Tensor]:
    """Compute the log-probs of completions under a policy, or other values [..., M] of a micro-batch's M tokens.

    `passes` is the number of passes of each rank in lockstep (`Policy.lockstep`), or None if all ranks have equally
    many micro-batches. Returns values [..., T] for each sample, by default fp32 log-probs in nats.
    """
    values = [None] * len(samples)
    parts = micro_batches(samples, scoring.max_tokens, scoring.share_prompt, policy.own_attention)
    for indices in parts:
        part = [samples[i] for i in indices]
        batch = Batch.pack(part, policy.device, scoring.share_prompt)
        flat = policy.within(partial(compute, policy, batch, scoring.temperature))
        lengths = [len(sample.drawn) for sample in part]
        for i, of_sample in zip(indices, flat.split(lengths, dim=-1), strict=True):
            values[i] = of_sample
    if policy.lockstep and passes is not None:
        assert len(parts) <= passes, f"{len(parts)} micro-batches in {passes} passes"
        for _ in range(passes - len(parts)):
            policy.within(policy.idle_loss)
    return values


def make_reference(
    policy: Policy, beta: float, *, device: str | None = None, quantization: str | None = None, moving: bool = False
) -> "Reference | None":
    """Create the reference from the current policy."""
    if beta == 0:
        return None
    if has_adapters(policy.module):
        return AdaptersOff(policy)
    if quantization is not None:
        return QuantizedCopy(policy, quantization)
    return FrozenCopy(policy, moving) if device is None else StreamedCopy(policy, moving)


def frozen_copy(model: PreTrainedModel, device: str | None = None) -> PreTrainedModel:
    """Copy a model without gradients."""
    return _copy(model, lambda parameter: parameter.detach().to(device or parameter.device, copy=True))


def _empty_copy(model):
    """Copy a model without the values of its parameters. Untouched host memory takes no physical memory."""
    return _copy(model, lambda parameter: torch.empty(parameter.shape, dtype=parameter.dtype))


def _copy(model, value_of):
    parameters = {id(p): torch.nn.Parameter(value_of(p), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, parameters).eval()  # deepcopy takes the parameters from its memo


class Reference:
    """A frozen policy that scores samples."""

    def __init__(self, policy: Policy):
        self.policy = policy

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Make `policy` compute as the reference within the context."""
        yield

    def score(self, samples: Sequence[Sample], scoring: Scoring, passes: int | None = None) -> list[torch.Tensor]:
        """Compute the reference's log-probs of completions."""
        with self.ready():
            return score(self.policy, samples, scoring, passes)

    @torch.no_grad()
    def states(self, batch: Batch) -> tuple[torch.Tensor, HeadWeights]:
        """Compute the states [M, D] of a micro-batch's completion tokens, and the head, for the KL of distributions.

        Both are on the policy's device, without gradient, and stay valid while they are referenced. Within a pass of
        the sharded policy with adapters off, the head is valid until the backward of that pass.
        """
        # A sharded head stays gathered for the outermost pass.
        freed = self.policy.lockstep and not self.policy.inside
        with self.ready():
            return self.policy.within(partial(self._states, batch, freed))

    def _states(self, batch, freed):
        states, (weight, bias, softcap) = self.policy.completion_states(batch), self.policy.head
        held = [t if t is None else t.clone() if freed else t.detach() for t in (weight, bias)]
        return states, HeadWeights(*held, softcap)

    @torch.no_grad()
    def idle(self) -> None:
        """Run the pass of a rank without samples while other ranks call `states` in lockstep."""
        if self.policy.lockstep:
            with self.ready():
                self.policy.within(self.policy.idle_loss)

    def measure(self, samples: Sequence[Sample], scoring: Scoring, ranks: Ranks = ALONE) -> dict[str, float]:
        """Return metrics of the reference's accuracy, before it is used on samples."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: empty, because a resumed run creates the reference again."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class AdaptersOff(Reference):
    """The policy itself with its adapters disabled. It needs no memory."""

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Disable the adapters within the context."""
        with adapters_off(self.policy.module):
            yield


class FrozenCopy(Reference):
    """A frozen copy of the current policy."""

    def __init__(self, policy: Policy, moving: bool = False, device: str | None = None):
        if policy.lockstep and device is None:
            copied = policy.alike(Policy(_empty_copy(policy.for_rollouts.module), policy.own_attention))
        else:
            with policy.gather():
                copied = Policy(frozen_copy(policy.for_rollouts.module, device), policy.own_attention)
        super().__init__(copied)
        self.moving = moving

    @torch.no_grad()
    def sync(self, policy: Policy, alpha: float) -> None:
        """Set the weights to alpha policy + (1 - alpha) reference (TR-DPO, arXiv 2404.09656)."""
        theirs = policy.module.named_parameters() if self.policy.lockstep else policy.whole_parameters()
        mine = dict(self.policy.module.named_parameters())
        for name, value in theirs:  # each rank updates its own shards
            part = local(mine[name])
            part.lerp_(local(value).to(part.device, part.dtype), alpha)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights if the copy follows the policy; otherwise nothing."""
        return self.policy.module.state_dict() if self.moving else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the weights, if the state has any."""
        if state:
            self.policy.load_state_dict(state)


class StreamedCopy(FrozenCopy):
    """A copy in host memory. While it runs, the device holds two of its layers, its embedding and its head."""

    def __init__(self, policy: Policy, moving: bool = False):
        super().__init__(policy, moving, "cpu")
        self.stream = LayerStream(self.policy.module, policy.device)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let the copy compute on the policy's device within the context."""
        with self.stream.ready():
            yield


class QuantizedCopy(Reference):
    """A copy with quantized linear layers; embedding, norms and head keep their dtype.

    The first `measure` compares it with an exact copy, which is streamed and then dropped, as `ref/kl_error`.
    """

    def __init__(self, policy: Policy, quantization: str):
        with policy.gather():  # one gather for both copies
            module = quantize(frozen_copy(policy.for_rollouts.module, "cpu"), quantization, policy.device)
            self.exact = StreamedCopy(policy)
        super().__init__(Policy(module, policy.own_attention))

    def measure(self, samples: Sequence[Sample], scoring: Scoring, ranks: Ranks = ALONE) -> dict[str, float]:
        """In the first call, measure the KL between the copy and the exact reference."""
        if self.exact is None:
            return {}
        own = 0.0, 0
        if samples:
            log_ratio = torch.cat(self.score(samples, scoring)) - torch.cat(self.exact.score(samples, scoring))
            k3 = log_ratio.expm1() - log_ratio  # k3: e^d - d - 1
            own = k3.double().sum().item(), len(k3)
        total, tokens = map(sum, zip(*ranks.gather(own, "the error of the reference"), strict=True))
        if not tokens:
            return {}
        self.exact = None
        return {"ref/kl_error": total / tokens}

    def state_dict(self) -> dict[str, Any]:
        """Return whether the copy has been compared with the exact one."""
        return {"measured": self.exact is None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore whether the copy has been compared with the exact one."""
        if state.get("measured"):
            self.exact = None


ALIGNMENT = 256  # bytes, as CUDA's allocator aligns tensors


class HostWeights:
    """Parameters in one contiguous host buffer, so that one copy moves them all."""

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
        """Return a view of a buffer as one parameter."""
        return buffer[place].view(parameter.dtype).view(parameter.shape)

    def attach(self, buffer: torch.Tensor) -> None:
        """Make the parameters views of another buffer with the same content."""
        for parameter, place in zip(self.parameters, self.places, strict=True):
            parameter.data = self.view(buffer, parameter, place)


class LayerStream:
    """Runs a frozen model on a device that holds two of its layers at a time.

    The device also holds the parameters outside the layers (embedding, norm, head). All of this is freed when the
    context of `ready` ends.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        modules = decoder_layers(model)
        inside = {id(parameter) for module in modules for parameter in module.parameters()}
        self.rest = HostWeights([p for p in model.parameters() if id(p) not in inside], self.on_gpu)
        self.layers = [HostWeights(list(module.parameters()), self.on_gpu) for module in modules]
        for i, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._enter, i))
        self.copies = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.buffers, self.turn, self.coming, self.arrived = None, 0, None, None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let the model compute on the device within the context, and free the device's memory afterwards."""
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
            if self.on_gpu:  # the last copy must finish before the buffers' memory is reused
                torch.cuda.current_stream(self.device).wait_stream(self.copies)
            for weights in (self.rest, *self.layers):
                weights.attach(weights.host)
            self.buffers = self.coming = None

    def _fetch(self, i):
        """Start to copy layer i into the unused buffer."""
        self.turn = 1 - self.turn
        host = self.layers[i].host
        if self.on_gpu:  # wait until the layer in this buffer has run
            self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies) if self.on_gpu else nullcontext():
            self.buffers[self.turn][: len(host)].copy_(host, non_blocking=True)
            self.arrived = self.copies.record_event() if self.on_gpu else None
        self.coming = i

    def _enter(self, i, *_):
        """Before layer i runs, wait for its copy, and start to copy the next one (after the last, the first)."""
        if self.coming != i:
            raise RuntimeError(
                f"layer {i} runs, but layer {self.coming} was fetched: the layers of a streamed model must run in order"
            )
        if self.on_gpu:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        self.layers[i].attach(self.buffers[self.turn])
        self._fetch((i + 1) % len(self.layers))
