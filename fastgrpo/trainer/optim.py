"""AdamW with fp32 masters, and its learning-rate schedule.

A bf16 weight has 8 bits of mantissa, so updates below 1/256 of the weight are rounded to 0. At a learning rate of 1e-6
these are nearly all updates. So the module holds bf16 weights for speed, and the optimizer holds fp32 masters,
gradients and moments. After each step the masters are copied into the module's weights, which rollouts read too.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from fastgrpo.policy.shard import fill, local
from fastgrpo.ranks import Ranks


class MasterAdamW:
    """AdamW (arXiv 1711.05101) over a module's trainable parameters, with an fp32 master of each one below fp32.

    Within `receiving`, a hook adds the gradient of each low-precision parameter to its master's gradient as soon as it
    is computed. Gradients therefore accumulate over micro-batches in fp32, and are stored only once.

    The parameters of a sharded policy are fp32 shards and their own masters. Gradients and moments are sharded too.

    With `optim` "adamw_8bit", bitsandbytes keeps the moments in blocks of 256 8-bit numbers, those of parameters with
    fewer than 4096 numbers in fp32 (arXiv 2110.02861). It waits for the device in each step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        optim: str = "adamw_torch",
    ) -> None:
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not named:
            raise ValueError(f"{type(model).__name__} has no trainable parameters")
        self.pairs = []  # (parameter, master) of each parameter below fp32; the others are their own masters
        masters = [self._master(parameter) for parameter in named.values()]
        self._note_versions()
        # Norms and biases have no weight decay, as usual.
        groups = [
            {"params": [m for m in masters if m.ndim >= 2], "weight_decay": weight_decay},
            {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
        ]
        self.names, self.masters = list(named), masters
        # All of them are sharded or none: adapters are never sharded, and are trained without other weights.
        self.sharded = isinstance(masters[0], DTensor)
        settings = {"params": [group for group in groups if group["params"]], "lr": learning_rate, "betas": betas}
        self.fused = optim == "adamw_torch"
        if self.fused:
            self.adamw = torch.optim.AdamW(**settings, eps=eps, fused=True)
            return
        if self.sharded:
            raise ValueError(
                "optim=adamw_8bit cannot update sharded weights; use --optim adamw_torch or --parallel ddp"
            )
        from bitsandbytes.optim import AdamW8bit

        self.adamw = AdamW8bit(**settings, eps=eps)

    def _master(self, parameter):
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        master = parameter.detach().float().requires_grad_()
        self.pairs.append((parameter, master))
        return master

    def _note_versions(self):
        self.versions = [parameter._version for parameter, _ in self.pairs]

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Clear all gradients. Within the context, add gradients of parameters below fp32 to those of their masters.

        If something else, such as another trainer of the model, has changed a parameter since the last update, its
        master takes the new values. A parameter that was changed and changed back keeps its exact master.
        """
        with torch.no_grad():
            for (parameter, master), version in zip(self.pairs, self.versions, strict=True):
                parameter.grad = None
                if parameter._version != version and not torch.equal(parameter, master.to(parameter.dtype)):
                    master.copy_(parameter)
        for master in self.masters:
            master.grad = None
        trained = [(p, master) for p, master in self.pairs if p.requires_grad]  # scripts may freeze some
        hooks = [p.register_post_accumulate_grad_hook(partial(_move, master)) for p, master in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def reduce(self, ranks: Ranks, loss: torch.Tensor | None) -> torch.Tensor | None:
        """Sum the loss and the gradients of unsharded masters over the ranks, in one exchange.

        The gradients of sharded masters are already summed in the backward passes. All ranks must call this together,
        if any of them has a gradient. A missing gradient counts as zeros. If a master has no gradient on any rank, such
        as an expert without tokens, it stays None: AdamW would otherwise decay the weight.
        """
        if ranks.size == 1:
            return loss
        whole = []
        if not self.sharded:
            mine = [master.grad is not None for master in self.masters]
            used = map(any, zip(*ranks.gather(mine, "the list of weights with gradients"), strict=True))
            whole = [master for master, has_gradient in zip(self.masters, used, strict=True) if has_gradient]
        for master in whole:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        first = self.masters[0]
        total = torch.zeros((), dtype=first.dtype, device=first.device)
        if loss is not None:
            total += loss.to(total.device)
        ranks.sum([*(master.grad for master in whole), total], "the gradients")
        return total

    @torch.no_grad()
    def step(self, max_grad_norm: float = 0.0, loss: torch.Tensor | None = None) -> torch.Tensor:
        """Clip the gradients, update the masters, and copy them into the module.

        If the gradient norm or the loss is not finite, the update is skipped: weights and moments do not change. With
        fused AdamW the device decides this, without a sync.
        """
        if all(master.grad is None for master in self.masters):  # no sample had a gradient: TRL's gradients are 0
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        norm = self._clip(max_grad_norm if max_grad_norm > 0 else torch.inf)
        norm = norm.to(self.masters[0].device)
        finite = norm.isfinite()
        if loss is not None:
            finite &= loss.to(norm.device).isfinite()  # fsdp2_offload on one rank: norm on the CPU, loss on the GPU
        self.adamw.found_inf = (~finite).float()  # if this is 1, fused AdamW changes nothing
        if self.fused or finite:
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        torch.autograd.graph.increment_version(self.masters)  # fused AdamW does not
        self.to_module()
        return torch.where(finite, norm, torch.nan)

    def _clip(self, limit):
        """Clip the gradient norm to `limit`, and return the norm before clipping."""
        parts = [local(master.grad) for master in self.masters if master.grad is not None]
        if not self.sharded or not parts:
            return torch.nn.utils.clip_grad_norm_(self.masters, limit)
        mesh = self.masters[0].device_mesh
        square = torch.nn.utils.get_total_norm(parts).square().to(mesh.device_type)
        torch.distributed.all_reduce(square, group=mesh.get_group())
        norm = square.sqrt()
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        torch._foreach_mul_(parts, scale.to(parts[0].device))
        return norm

    def bytes_to_come(self, device: torch.device, gradients: bool = True) -> int:
        """Return the bytes to allocate on a device: moments before the first step, and gradients if `gradients`."""
        moments = 2 if self.fused else 0.5  # as a share of the bytes of a master
        come = 0
        for master in self.masters:
            part = local(master.detach())
            if part.device.type == device.type:
                come += part.nbytes * (
                    moments * (not self.adamw.state.get(master)) + (gradients and master.grad is None)
                )
        return math.ceil(come)

    def state_dict(self) -> dict[str, Any]:
        """Return the fp32 masters of the parameters below fp32, and the state of AdamW."""
        return {
            "masters": [master.detach() for _, master in self.pairs],
            "adamw": torch.optim.Optimizer.state_dict(self.adamw),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a saved state of one process into masters and AdamW. Each rank fills its own shards.

        The module's weights must have been loaded before. Weights that were below fp32 in the saved run, and are fp32
        shards now, get the values of their saved masters.
        """
        owners = [master for _, master in self.pairs]
        if len(state["masters"]) == len(self.masters):
            owners = self.masters  # also if weights that were below fp32 in one process are fp32 shards now
        of_groups = [master for group in self.adamw.param_groups for master in group["params"]]
        groups, moments = state["adamw"]["param_groups"], state["adamw"]["state"]
        if len(owners) != len(state["masters"]) or sum(len(group["params"]) for group in groups) != len(of_groups):
            raise ValueError("the state of the optimizer belongs to other parameters than the policy's")
        for master, saved in zip(owners, state["masters"], strict=True):
            fill(master, saved)
        for index, saved in moments.items():
            mine = self._moments(of_groups[index])
            for name, value in mine.items():
                if isinstance(value, torch.Tensor):
                    fill(value, saved[name])
                else:  # the count of steps, with bitsandbytes
                    mine[name] = saved[name]
        self._take_over(groups)
        self._note_versions()  # of the weights that were loaded before

    def named_state(self) -> dict[str, Any]:
        """Return the same state by parameter names, which do not depend on the sharding."""
        state = {}
        for name, master in zip(self.names, self.masters, strict=True):
            parts = {"master": master.detach(), **self.adamw.state.get(master, {})}
            state |= {f"{part}.{name}": tensor for part, tensor in parts.items()}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.adamw.param_groups]
        return state | {"groups": groups}

    def make_room(self, names: Collection[str]) -> None:
        """Allocate the moments of a saved state, so that `named_state` returns the tensors to fill."""
        masters = dict(zip(self.names, self.masters, strict=True))
        moment = "exp_avg" if self.fused else "state1"
        saved = defaultdict(set)
        for kind, _, name in (n.partition(".") for n in names):
            saved[kind].add(name)
        if saved["master"] != masters.keys() or not saved[moment] <= masters.keys():
            raise ValueError("the state of the optimizer belongs to other parameters than the policy's")
        for name in saved[moment]:
            self._moments(masters[name])

    @torch.no_grad()
    def load_named_state(self, state: dict[str, Any]) -> None:
        """Restore the settings of AdamW, after its tensors were filled in place, and copy the masters to the module."""
        self._take_over(state["groups"])
        for name, master in zip(self.names, self.masters, strict=True):
            if f"step.{name}" in state:  # a number, with bitsandbytes
                self.adamw.state[master]["step"] = state[f"step.{name}"]
        self.to_module()

    def _moments(self, master):
        """Return the state of AdamW for a master. If missing, initialize it as AdamW does."""
        if not self.adamw.state[master] and not self.fused:
            self.adamw.init_state(self.adamw.param_groups[0], master, 0, 0)
        elif not self.adamw.state[master]:
            step = torch.zeros((), dtype=torch.float32, device=master.device)
            moments = (torch.zeros_like(master, memory_format=torch.preserve_format) for _ in range(2))
            self.adamw.state[master] = dict(zip(("step", "exp_avg", "exp_avg_sq"), (step, *moments), strict=True))
        return self.adamw.state[master]

    def _take_over(self, groups):
        """Restore the settings of AdamW, such as the current learning rate."""
        for mine, saved in zip(self.adamw.param_groups, groups, strict=True):
            mine.update({name: value for name, value in saved.items() if name != "params"})

    @torch.no_grad()
    def to_module(self) -> None:
        """Copy the masters into the module's weights below fp32."""
        if self.pairs:
            torch._foreach_copy_(*map(list, zip(*self.pairs, strict=True)))  # one launch for many weights
            self._note_versions()


def _move(master, parameter):
    """Add a parameter's gradient to its master's gradient in fp32, and free it. On a GPU, add_ needs no fp32 copy."""
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def make_schedule(
    optimizer: MasterAdamW,
    name: str,
    *,
    warmup_steps: float,
    total_steps: int,
    further: Mapping[str, Any] | None = None,
) -> LRScheduler:
    """Create one of transformers' learning-rate schedules."""
    if 0 < warmup_steps < 1:
        warmup_steps = math.ceil(warmup_steps * total_steps)  # as transformers
    try:
        schedule = get_scheduler(
            name,
            optimizer.adamw,
            num_warmup_steps=int(warmup_steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(further or {}),
        )
    except (ValueError, TypeError) as error:
        given = f" with lr_scheduler_kwargs {further}" if further else ""
        raise ValueError(f"lr_scheduler_type {name!r} cannot be used{given}: {error}") from None
    if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):  # such as reduce_lr_on_plateau
        raise ValueError(
            f"lr_scheduler_type {name!r} depends on a metric, not on the steps; use another schedule, such as cosine"
        )
    return schedule


def check_schedule(name: str, further: Mapping[str, Any] | None = None) -> None:
    """Check the name of a schedule, without a model."""
    optimizer = MasterAdamW(torch.nn.Linear(1, 1), learning_rate=1.0)
    make_schedule(optimizer, name, warmup_steps=0, total_steps=1, further=further)
