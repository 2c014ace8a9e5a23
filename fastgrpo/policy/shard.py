"""A policy whose weights are sharded over the ranks with torch's FSDP2 (`fully_shard`), one unit per layer.

Each rank holds a shard of every weight in fp32. The optimizer updates these shards; gradients and moments are sharded
too. A layer is gathered, in the compute dtype, just before it runs, and its gradients are reduced in fp32. Embedding,
final norm and head are one more unit, which stays gathered during `ShardedPolicy.within`. So loss and head read
gathered weights, and a tied embedding gets one gradient.

Every pass is collective, so all ranks run equally many: a rank without samples runs idle passes. Adapters are not
sharded; the optimizer sums their gradients (`MasterAdamW.reduce`).

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from fastgrpo.policy.lora import ADAPTER
from fastgrpo.policy.model import Policy, Result
from fastgrpo.ranks import Ranks, form_group

logger = logging.getLogger(__name__)


class Gathered:
    """Context manager that keeps the weights of a `WholeCopy` gathered.

    It is not a generator: Python closes an unreferenced generator at a different time on each rank, for example when an
    engine is dropped with requests in flight. The ranks would then disagree on whether to gather again.
    """

    def __init__(self, whole: "WholeCopy") -> None:
        self.whole = whole

    def __enter__(self) -> list[torch.Tensor]:
        if not self.whole.depth:
            self.whole.fill()
        self.whole.depth += 1
        return [parameter.detach() for parameter in self.whole.module.parameters()]

    def __exit__(self, *raised: object) -> None:
        self.whole.depth -= 1
        if not self.whole.depth and not self.whole.keep:
            self.whole.free()


class WholeCopy(Policy):
    """An unsharded copy of a policy before sharding. Its adapters are the policy's own, which are not sharded."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        memo, self.own = {}, []  # the copy's own parameters
        for name, parameter in policy.module.named_parameters():
            memo[id(parameter)] = parameter
            if ADAPTER not in name:
                memo[id(parameter)] = torch.nn.Parameter(_nothing(parameter, dtype), requires_grad=False)
                self.own.append(memo[id(parameter)])
        # deepcopy takes the parameters from the memo
        super().__init__(copy.deepcopy(policy.module, memo), policy.own_attention, policy.grouped)
        self.depth, self.keep, self.held = 0, False, False
        self.source: Policy | None = None  # the sharded policy that provides the weights

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the copy's parameters and their shards, whose versions an update increments."""
        return [*super().parameters(), *self.source.parameters()]

    def gather(self, keep: bool = False) -> "Gathered":
        """Gather the weights for a context. All ranks must enter it together.

        A nested context does nothing and communicates nothing, so ranks may nest it differently.
        """
        self.keep |= keep
        return Gathered(self)

    @torch.no_grad()
    def fill(self) -> None:
        """Gather the weights from the shards. All ranks must call it."""
        if not self.held:
            for parameter in self.own:
                parameter.data = parameter.new_empty(parameter.shape)
            self.held = True
        for name, weight in self.source.whole_parameters():
            self.module.get_parameter(name).copy_(weight)

    def free(self) -> None:
        """Free the weights. Their shapes stay, and their values are NaN."""
        for parameter in self.own:
            parameter.data = _nothing(parameter)
        self.held = False


def _nothing(like, dtype=None):
    """Return a tensor of NaNs of the same shape that takes no memory."""
    return torch.full((), torch.nan, dtype=dtype or like.dtype, device=like.device).expand(like.shape)


def check_torch() -> None:
    """Raise if torch is too old to shard every model."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ValueError(
            f"parallel=fsdp2 needs torch 2.13 or newer, but {torch.__version__} is installed; upgrade torch, or use "
            "--parallel ddp"
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a tensor that may be sharded. Each rank takes its own shard, without communication."""
    if isinstance(tensor, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local(tensor).copy_(local(value))


@dataclass(frozen=True)
class ShardLayout:
    """Settings of the sharding."""

    mesh: DeviceMesh  # one-dimensional
    device: torch.device  # of this rank
    dtype: torch.dtype  # of the computation
    reshard_after_forward: bool  # whether a layer's gathered weights are freed after its forward pass
    cpu_offload: bool  # whether the shards are in host memory
    ranks: Ranks

    def apply(self, unit: torch.nn.Module, ignored: set[torch.nn.Parameter], root: bool = False) -> None:
        """Shard the parameters of a module, except those of inner modules that are already sharded."""
        for parameter in unit.parameters():  # shards of trained weights are the optimizer's masters
            if parameter.requires_grad and parameter not in ignored and parameter.dtype.itemsize < 4:
                parameter.data = parameter.data.float()
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.cpu_offload else OffloadPolicy()
        fully_shard(
            unit,
            mesh=self.mesh,
            reshard_after_forward=None if root else self.reshard_after_forward,
            # Inputs of a layer keep their dtype, as in one process.
            mp_policy=MixedPrecisionPolicy(self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
            offload_policy=offload,
            ignored_params=ignored,
        )
        # The loss is a sum over the tokens of all ranks, so gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # An expert without tokens on this rank gets a gradient of zeros, because the reduction is collective.
        unit.set_reduce_scatter_unused_params(True)


def shard(
    policy: Policy, ranks: Ranks, *, dtype: torch.dtype, reshard_after_forward: bool = True, cpu_offload: bool = False
) -> "ShardedPolicy":
    """Shard a policy over the ranks. All ranks must call it with the same weights."""
    named = policy.module.named_parameters()
    others = {name: p.dtype for name, p in named if ADAPTER not in name and p.dtype != dtype}
    if others:
        name, kept = next(iter(others.items()))
        raise ValueError(
            f"parallel=fsdp2 needs one dtype, here {dtype}, but {type(policy.module).__name__} has {len(others)} "
            f"weights in another one ({name} in {kept}, ...); use --dtype float32, or --parallel ddp"
        )
    form_group(policy.device)
    mesh = init_device_mesh(policy.device.type, (ranks.size,))
    layout = ShardLayout(mesh, policy.device, dtype, reshard_after_forward, cpu_offload, ranks)
    whole = WholeCopy(policy, dtype)
    whole.source = ShardedPolicy(policy, layout, whole)
    return whole.source


class _Root(torch.nn.Module):
    """The outermost sharded module: embedding, norm and head are gathered during its forward, which calls `compute`."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, compute):
        return compute()


class ShardedPolicy(Policy):
    """A policy whose weights are sharded over the ranks, created by `shard`.

    Head and states can be used only inside `within`. Outside, the parameters of the module are shards, as DTensors.
    """

    lockstep = True
    _copy = staticmethod(fill)

    def __init__(self, policy: Policy, layout: ShardLayout, whole: WholeCopy | None = None) -> None:
        super().__init__(policy.module, policy.own_attention, policy.grouped)
        self.layout, self.whole, self.inside, self.root = layout, whole, False, _Root(self.module)
        self.exported, self.pins = {}, True  # name -> host buffer of a gathered weight; whether it can be pinned
        self.units = [*_layers(self.module), (self.root, [])]  # each with the names of its parameters
        adapters = {parameter for name, parameter in self.module.named_parameters() if ADAPTER in name}
        for unit, _ in self.units:
            layout.apply(unit, adapters, root=unit is self.root)
        in_layers = {name for _, names in self.units for name in names}
        names = [name for name, _ in self.module.named_parameters() if ADAPTER not in name]
        self.units[-1][1].extend(name for name in names if name not in in_layers)

    @property
    def device(self) -> torch.device:
        """The compute device of this rank. Shards may be in host memory."""
        return self.layout.device

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype. Shards of trained weights are fp32."""
        return self.layout.dtype

    @property
    def for_rollouts(self) -> Policy:
        """The unsharded copy, which has the weights within the context of its `gather`."""
        assert self.whole is not None, "a frozen reference generates nothing"
        return self.whole

    def gather(self, keep: bool = False) -> Gathered:
        """Gather the weights in `for_rollouts`, see `WholeCopy.gather`. All ranks must call it."""
        return self.for_rollouts.gather(keep)

    def within(self, compute: Callable[[], Result]) -> Result:
        """Run a computation that reads the weights. All ranks must call this equally often, in the same order.

        A nested call just runs the computation. The result must not be a gathered weight, which is freed afterwards.
        """
        if self.inside:
            return compute()
        self.inside = True
        try:
            result = self.root(compute)
        finally:
            self.inside = False
        if not torch.is_grad_enabled():  # no backward pass will free the gathered weights
            self.root.reset_iter_state()  # frees the weights, and torch's state of the pass
        return result

    @torch.no_grad()
    def alike(self, copy: Policy) -> "ShardedPolicy":
        """Shard a copy of this policy in the same way; each rank copies its own shards, without communication."""
        sharded = ShardedPolicy(copy, self.layout)
        for part, mine in zip(sharded.module.parameters(), self.module.parameters(), strict=True):
            fill(part, mine)
        return sharded

    @torch.no_grad()
    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the sharded weights one by one, gathered, in the compute dtype. All ranks must exhaust this."""
        self.layout.ranks.meet("whole weights")
        for unit, names in self.units:
            with self.layout.ranks.waiting("whole weights"):
                unit.unshard()
            try:
                for name in names:
                    yield name, self.module.get_parameter(name).detach()
            finally:
                unit.reshard()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the `state_dict` of the unsharded policy on rank 0, gathered by layer. All ranks must call it."""
        lead, mine, whole = self.layout.ranks.lead, self.state_dict(), {}
        if any(isinstance(value, DTensor) for value in mine.values()):
            for name, value in self.whole_parameters():
                if lead:
                    whole[name] = self._export(name, value)
            if lead and self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # wait for the copies
        if not lead:
            return {}
        first = {}  # a tied weight has several names and is gathered under the first one
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            whole.setdefault(name, whole.get(first.setdefault(id(parameter), name)))
        return {n: whole[n] if isinstance(value, DTensor) else value.to("cpu", copy=True) for n, value in mine.items()}

    def _export(self, name, value):
        """Start to copy a gathered weight to its host buffer. The GPU frees it after the copy, in stream order."""
        if name not in self.exported:
            self.exported[name] = self._host_memory(value)
        return self.exported[name].copy_(value, non_blocking=True)

    def _host_memory(self, like):
        """Allocate host memory, pinned if possible, because a GPU copies to it much faster."""
        if like.is_cuda and self.pins:
            try:
                return torch.empty_like(like, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self.pins = False
                reason = str(error).partition("\n")[0]
                logger.warning("cannot pin memory for exported weights, so saving takes longer (%s)", reason)
        return torch.empty_like(like, device="cpu")


def _layers(module):
    """Return the layers, inner ones first, each with the names of its parameters to shard."""
    layers, taken = [], set()
    for prefix, layer in reversed(list(module.named_modules())):
        if isinstance(layer, GradientCheckpointingLayer):
            names = [f"{prefix}.{name}" for name, _ in layer.named_parameters() if ADAPTER not in name]
            layers.append((layer, [name for name in names if name not in taken]))
            taken.update(names)
    return layers
