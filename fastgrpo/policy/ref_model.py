"""The reference policy of the KL term.

It is the policy without its adapters, or a frozen copy of the policy as it was when training began. The copy lies on
the device; or in host memory, from where its layers are streamed to the device one by one; or it is quantized. At
beta = 0 there is no reference.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.lora import adapters_off, has_adapters
from fastgrpo.policy.micro_batches import micro_batches
from fastgrpo.policy.model import HeadWeights, Policy
from fastgrpo.policy.shard import local
from fastgrpo.ranks import ALONE, Ranks


class Scoring(NamedTuple):
    """How samples are scored: at which temperature, and in which micro-batches."""

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

    `passes` is how many passes the policy makes on each rank in lockstep (`Policy.lockstep`); None where ranks have
    equally many micro-batches anyway. Returns [..., T] values for each sample, fp32 log-probs in nats by default.
    """
    values, parts = [None] * len(samples), micro_batches(samples, scoring.max_tokens, scoring.share_prompt)
    for indices in parts:
        part = [samples[i] for i in indices]
        batch = Batch.pack(part, policy.device, scoring.share_prompt)
        flat = policy.within(partial(compute, policy, batch, scoring.temperature))
        lengths = [len(sample.ids) for sample in part]
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
    """Make the reference of a policy, as the policy is now."""
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
    """Copy a model, but not the values of its parameters. Host memory that nobody has written takes no room."""
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
        """Make `policy` compute as the reference while the context manager is open."""
        yield

    def score(self, samples: Sequence[Sample], scoring: Scoring, passes: int | None = None) -> list[torch.Tensor]:
        """Compute the reference's log-probs of completions."""
        with self.ready():
            return score(self.policy, samples, scoring, passes)

    @torch.no_grad()
    def states(self, batch: Batch) -> tuple[torch.Tensor, HeadWeights]:
        """Compute the hidden states that the KL of the full distributions takes, of one micro-batch.

        Returns:
            [M, D], one state for each completion token, and the head, without gradient. Both are on the policy's device
            and stay there as long as they are held, also the head of a copy in host memory. In a pass of the sharded
            policy whose adapters are off, the head stays until that pass has gone backward.
        """
        # A sharded head is whole as long as the outermost pass lasts.
        passes_away = self.policy.lockstep and not self.policy.inside
        with self.ready():
            return self.policy.within(partial(self._states, batch, passes_away))

    def _states(self, batch, passes_away):
        states, (weight, bias, softcap) = self.policy.completion_states(batch), self.policy.head
        held = [t if t is None else t.clone() if passes_away else t.detach() for t in (weight, bias)]
        return states, HeadWeights(*held, softcap)

    @torch.no_grad()
    def idle(self) -> None:
        """Make the pass of a rank without samples, where other ranks call `states` and all must pass together."""
        if self.policy.lockstep:
            with self.ready():
                self.policy.within(self.policy.idle_loss)

    def measure(self, samples: Sequence[Sample], scoring: Scoring, ranks: Ranks = ALONE) -> dict[str, float]:
        """Measure how good the reference is, before it is used on samples."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: nothing, because a resumed run makes the reference anew."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class AdaptersOff(Reference):
    """The policy itself while its adapters are off. It costs no memory."""

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Switch the adapters off while the context manager is open."""
        with adapters_off(self.policy.module):
            yield


class FrozenCopy(Reference):
    """A copy of the policy as it is now, without gradients."""

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
        """Move the weights towards the policy's (TR-DPO, arXiv 2404.09656).

        reference = alpha policy + (1 - alpha) reference
        """
        theirs = policy.module.named_parameters() if self.policy.lockstep else policy.whole_parameters()
        mine = dict(self.policy.module.named_parameters())
        for name, value in theirs:  # of shards, each rank moves its own
            part = local(mine[name])
            part.lerp_(local(value).to(part.device, part.dtype), alpha)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of a copy that follows the policy, and nothing for any other copy."""
        return self.policy.module.state_dict() if self.moving else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the weights, if the state has any."""
        if state:
            self.policy.load_state_dict(state)


class StreamedCopy(FrozenCopy):
    """A copy in host memory. Only while it runs, the device holds two of its layers, its embedding and its head."""

    def __init__(self, policy: Policy, moving: bool = False):
        super().__init__(policy, moving, "cpu")
        self.stream = LayerStream(self.policy.module, policy.device)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let the copy compute on the policy's device while the context manager is open."""
        with self.stream.ready():
            yield


class QuantizedCopy(Reference):
    """A copy with quantized linear layers; embedding, norms and head keep their dtype.

    The first `measure` takes `ref/kl_error` against the exact copy, which is streamed for it and then dropped.
    """

    def __init__(self, policy: Policy, quantization: str):
        with policy.gather():  # one for both copies
            module = quantize(frozen_copy(policy.for_rollouts.module, "cpu"), quantization, policy.device)
            self.exact = StreamedCopy(policy)
        super().__init__(Policy(module, policy.own_attention))

    def measure(self, samples: Sequence[Sample], scoring: Scoring, ranks: Ranks = ALONE) -> dict[str, float]:
        """Measure, the first time, how far the copy's log-probs are from the exact ones."""
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


NF4_BLOCK = 64  # how many weights share a scale


def quantize(model: PreTrainedModel, name: str, device: torch.device | str) -> PreTrainedModel:
    """Quantize all linear layers of a frozen model except the head, and move the model to a device.

    The matrix products still run in the model's dtype.
    """
    device = torch.device(device)
    lm_head = model.get_output_embeddings()
    if name == "int8":
        try:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
        except ImportError:
            raise ValueError("ref_storage=int8 needs torchao: pip install 'fastgrpo[quantization]'") from None
        config = Int8WeightOnlyConfig(set_inductor_config=False)  # inductor's would also switch TF32 on
        quantize_(
            model, config, lambda module, _: isinstance(module, torch.nn.Linear) and module is not lm_head, device
        )
        return model.to(device)
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError:
        raise ValueError("ref_storage=nf4 needs bitsandbytes: pip install 'fastgrpo[quantization]'") from None
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module is not lm_head:
            weight = module.weight
            if device.type == "cpu" and module.in_features % NF4_BLOCK:
                raise ValueError(
                    f"{path} has {module.in_features} inputs: on a CPU bitsandbytes reads nf4 weights wrongly unless "
                    f"that is a multiple of {NF4_BLOCK}; use ref_storage=int8, or a GPU"
                )
            layer = Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=weight.dtype, quant_type="nf4",
                device="meta",
            )  # fmt: skip
            layer.weight = Params4bit(weight.data, requires_grad=False, quant_type="nf4", module=layer)
            layer.bias = module.bias
            model.set_submodule(path, layer.to(device))  # moving the layer quantizes its weight
    return model.to(device)


ALIGNMENT = 256  # bytes: CUDA's allocator aligns tensors to as many


class HostWeights:
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
        """View the bytes of one parameter in a buffer as that parameter."""
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
        self.rest = HostWeights([p for p in model.parameters() if id(p) not in inside], self.on_gpu)
        self.layers = [HostWeights(list(module.parameters()), self.on_gpu) for module in modules]
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
