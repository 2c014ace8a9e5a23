"""The policy whose weights are sharded over the ranks: torch's FSDP2 (`fully_shard`), one unit for each layer.

Each rank holds a part of every weight, in fp32: the optimizer updates these parts, and gradients and moments are parts
too. A layer becomes whole, in the dtype that passes compute in, just before it runs, and its gradients are added up
over the ranks in fp32. Embedding, final norm and head are a unit of their own, which is whole as long as
`ShardedPolicy.within` computes. So loss and head read whole weights, and a tied embedding gets one gradient.

Every pass sends weights between the ranks, so all ranks make equally many: one without samples makes idle ones.
Adapters are not sharded. Their gradients are added up by the optimizer (`MasterAdamW.reduce`).

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
from fastgrpo.ranks import Ranks

logger = logging.getLogger(__name__)


class Gathered:
    """Holds the weights of a whole copy while it is open.

    It is not a generator, because Python closes an unreferenced generator at a moment that differs between ranks, as
    when an engine is dropped with requests in flight. The ranks would then disagree on whether to gather again.
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
    """A whole copy of a policy that is about to be sharded. Adapters are not sharded, so it has the policy's own."""

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
        self.source: Policy | None = None  # the sharded policy, which the weights come from

    def parameters(self) -> list[torch.nn.Parameter]:
        """List the copy's parameters and the shards that they are made from. An update raises the shards' versions."""
        return [*super().parameters(), *self.source.parameters()]

    def gather(self, keep: bool = False) -> "Gathered":
        """Hold the whole weights while a context manager is open. All ranks must open it together.

        Where one is open already, this does nothing and sends nothing, so ranks need not agree on calls inside of it.
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
        """Free the weights. Their shapes stay, and reading one gives NaN."""
        for parameter in self.own:
            parameter.data = _nothing(parameter)
        self.held = False


def _nothing(like, dtype=None):
    """Make a tensor of the same shape that takes no memory: it is NaN everywhere."""
    return torch.full((), torch.nan, dtype=dtype or like.dtype, device=like.device).expand(like.shape)


def check_torch() -> None:
    """Refuse a version of torch that cannot shard every model."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ValueError(
            f"parallel=fsdp2 needs torch 2.13 or newer, and this is {torch.__version__}; upgrade torch, or take "
            "--parallel ddp"
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a tensor that may be sharded. Nothing is sent: each rank cuts out its own part."""
    if isinstance(tensor, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local(tensor).copy_(local(value))


@dataclass(frozen=True)
class ShardLayout:
    """How weights are sharded.

    Attributes:
        mesh: The ranks, one-dimensional.
        device: Where this rank computes.
        dtype: The dtype that passes compute in.
        reshard_after_forward: Whether a layer's whole weights are freed after its forward pass.
        cpu_offload: Whether the parts lie in host memory.
        ranks: The ranks.
    """

    mesh: DeviceMesh
    device: torch.device
    dtype: torch.dtype
    reshard_after_forward: bool
    cpu_offload: bool
    ranks: Ranks

    def apply(self, unit: torch.nn.Module, ignored: set[torch.nn.Parameter], root: bool = False) -> None:
        """Shard what a module holds, except for what modules inside of it hold that are sharded already."""
        for parameter in unit.parameters():  # parts of trained weights are the optimizer's masters
            if parameter.requires_grad and parameter not in ignored and parameter.dtype.itemsize < 4:
                parameter.data = parameter.data.float()
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.cpu_offload else OffloadPolicy()
        fully_shard(
            unit,
            mesh=self.mesh,
            reshard_after_forward=None if root else self.reshard_after_forward,
            # What comes into a layer keeps its dtype, as in one process.
            mp_policy=MixedPrecisionPolicy(self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
            offload_policy=offload,
            ignored_params=ignored,
        )
        # A loss is a sum over the tokens of all ranks: gradients are added up, and not averaged as torch would.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # An expert that has no token on one rank gets a gradient of zeros there, as the other ranks wait for it.
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
            f"parallel=fsdp2 computes in one dtype, here {dtype}, but {type(policy.module).__name__} keeps "
            f"{len(others)} weights in another one ({name} in {kept}, ...); take --dtype float32, or --parallel ddp"
        )
    mesh = init_device_mesh(policy.device.type, (ranks.size,))
    layout = ShardLayout(mesh, policy.device, dtype, reshard_after_forward, cpu_offload, ranks)
    whole = WholeCopy(policy, dtype)
    whole.source = ShardedPolicy(policy, layout, whole)
    return whole.source


class _Root(torch.nn.Module):
    """The outermost sharded module: embedding, norm and head are whole while it computes whatever it is given."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, compute):
        return compute()


class ShardedPolicy(Policy):
    """A policy whose weights are sharded over the ranks. `shard` makes it.

    Head, states and what is computed with them work only inside of `within`. Outside of it, the parameters of the
    module are the parts, as DTensors.
    """

    lockstep = True
    _copy = staticmethod(fill)

    def __init__(self, policy: Policy, layout: ShardLayout, whole: WholeCopy | None = None) -> None:
        super().__init__(policy.module, policy.own_attention, policy.grouped)
        self.layout, self.whole, self.inside, self.root = layout, whole, False, _Root(self.module)
        self.exported, self.pins = {}, True  # name -> host memory of a whole weight, kept; whether it can be pinned
        self.units = [*_layers(self.module), (self.root, [])]  # each with the names of the parameters that it holds
        adapters = {parameter for name, parameter in self.module.named_parameters() if ADAPTER in name}
        for unit, _ in self.units:
            layout.apply(unit, adapters, root=unit is self.root)
        in_layers = {name for _, names in self.units for name in names}
        names = [name for name, _ in self.module.named_parameters() if ADAPTER not in name]
        self.units[-1][1].extend(name for name in names if name not in in_layers)

    @property
    def device(self) -> torch.device:
        """Where this rank computes. Parts may lie in host memory."""
        return self.layout.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that passes compute in. The parts of trained weights are in fp32."""
        return self.layout.dtype

    @property
    def for_rollouts(self) -> Policy:
        """The whole copy, which holds the weights while its `gather` is open."""
        assert self.whole is not None, "a frozen reference draws nothing"
        return self.whole

    def gather(self, keep: bool = False) -> Gathered:
        """Provide the whole weights in `for_rollouts`, see `WholeCopy.gather`. All ranks must call it."""
        return self.for_rollouts.gather(keep)

    def within(self, compute: Callable[[], Result]) -> Result:
        """Run a computation that reads the weights. All ranks must call this equally often, in the same order.

        A call inside of such a computation just runs what it is given. What it returns must not be a whole weight,
        which is freed afterwards.
        """
        if self.inside:
            return compute()
        self.inside = True
        try:
            result = self.root(compute)
        finally:
            self.inside = False
        if not torch.is_grad_enabled():  # no backward pass will free what is whole
            self.root.reset_iter_state()  # frees the weights, and what torch notes of each pass
        return result

    @torch.no_grad()
    def alike(self, copy: Policy) -> "ShardedPolicy":
        """Shard a copy of this policy as this policy is sharded, and give it this policy's weights.

        Each rank copies its own parts, and nothing is sent.
        """
        sharded = ShardedPolicy(copy, self.layout)
        for part, mine in zip(sharded.module.parameters(), self.module.parameters(), strict=True):
            fill(part, mine)
        return sharded

    @torch.no_grad()
    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Provide what is sharded one by one, whole, in the dtype that passes compute in.

        All ranks must call it and take everything.
        """
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
        """Collect what `state_dict` of the whole policy would return, layer by layer. All ranks must call it."""
        lead, mine, whole = self.layout.ranks.lead, self.state_dict(), {}
        if any(isinstance(value, DTensor) for value in mine.values()):
            for name, value in self.whole_parameters():
                if lead:
                    whole[name] = self._export(name, value)
            if lead and self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # the copies are complete
        if not lead:
            return {}
        first = {}  # a tied weight has several names and is gathered under the first one
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            whole.setdefault(name, whole.get(first.setdefault(id(parameter), name)))
        return {n: whole[n] if isinstance(value, DTensor) else value.to("cpu", copy=True) for n, value in mine.items()}

    def _export(self, name, value):
        """Start to copy a whole weight into its host memory. The GPU frees it after that, as it works in order."""
        if name not in self.exported:
            self.exported[name] = self._host_memory(value)
        return self.exported[name].copy_(value, non_blocking=True)

    def _host_memory(self, like):
        """Allocate host memory for a copy: pinned as long as that works, to which a GPU copies much faster."""
        if like.is_cuda and self.pins:
            try:
                return torch.empty_like(like, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self.pins = False
                reason = str(error).partition("\n")[0]
                logger.warning("no memory can be pinned for exported weights: GPUs wait longer for a save (%s)", reason)
        return torch.empty_like(like, device="cpu")


def _layers(module):
    """List the layers, inner ones first, each with the names of the parameters in it that are to be sharded."""
    layers, taken = [], set()
    for prefix, layer in reversed(list(module.named_modules())):
        if isinstance(layer, GradientCheckpointingLayer):
            names = [f"{prefix}.{name}" for name, _ in layer.named_parameters() if ADAPTER not in name]
            layers.append((layer, [name for name in names if name not in taken]))
            taken.update(names)
    return layers
