"""AdamW with fp32 masters, and its learning-rate schedule.

A bf16 weight has 8 bits of mantissa, so an update below 1/256 of the weight is rounded away. At a learning rate of 1e-6
that is nearly every update. So the module holds bf16 weights for speed, and the optimizer holds fp32 masters, gradients
and moments. After each step the masters are copied into the storage of the module's weights, which rollouts read too.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from fastgrpo.policy.shard import local
from fastgrpo.ranks import Ranks


class MasterAdamW:
    """AdamW (arXiv 1711.05101) over a module's trainable parameters, with an fp32 master of each one below fp32.

    The gradient of a low-precision parameter is added to its master's gradient in fp32 as soon as it exists. So the
    accumulation over micro-batches loses no precision, and no second copy of the gradients stays in memory.

    The parameters of a sharded policy are fp32 shards. They are their own masters, and so are gradients and moments.

    Args:
        model: The module whose trainable parameters are updated.
        learning_rate: The learning rate before a schedule changes it.
        betas: The decay rates of the first and the second moment.
        eps: Added to the root of the second moment in the denominator.
        weight_decay: The decoupled weight decay of parameters with at least two dimensions. Norms and biases have none.

    Raises:
        ValueError: The module has no trainable parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not named:
            raise ValueError(f"{type(model).__name__} has no trainable parameters")
        self.pairs = []  # (parameter, master) of each parameter below fp32; the others are their own masters
        masters = [self._master(parameter) for parameter in named.values()]
        # Norms and biases are not decayed, which is common practice.
        groups = [
            {"params": [m for m in masters if m.ndim >= 2], "weight_decay": weight_decay},
            {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
        ]
        self.masters = masters
        # Either all of them are sharded, or none: adapters, which are not, are trained alone.
        self.sharded = isinstance(masters[0], DTensor)
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=learning_rate, betas=betas, eps=eps, fused=True
        )

    def _master(self, parameter):
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        master = parameter.detach().float().requires_grad_()
        self.pairs.append((parameter, master))

        def move(parameter):
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)  # in fp32; on a GPU without a copy of the addend
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(move)
        return master

    @torch.no_grad()
    def reduce(self, ranks: Ranks, loss: torch.Tensor | None) -> torch.Tensor | None:
        """Add up over the ranks the gradients of masters that each rank holds whole, and the loss, in one exchange.

        The gradients of sharded masters have been added up in the backward passes. All ranks must call this together,
        if any of them has a gradient. A rank without one counts as zeros.

        Args:
            ranks: The ranks.
            loss: The loss of this rank, a scalar tensor; None where it has had no samples.

        Returns:
            The loss of all ranks, a scalar tensor.
        """
        if ranks.size == 1:
            return loss
        whole = [] if self.sharded else self.masters
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

        Where the norm of the gradients or the loss is not finite, the update is skipped: weights and moments stay as
        they are. This is decided on the device, so the host does not wait for it.

        Args:
            max_grad_norm: The norm to which larger gradients are scaled down. 0 turns clipping off.
            loss: The loss of the update, a scalar tensor. None leaves the decision to the gradients alone.

        Returns:
            The norm of the gradients before clipping, a scalar tensor on the masters' device. NaN where the update was
            skipped.
        """
        norm = self._clip(max_grad_norm if max_grad_norm > 0 else torch.inf)
        norm = norm.to(self.masters[0].device)  # without any gradient, torch returns the norm on the CPU
        finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite()
        self.adamw.found_inf = (~finite).float()  # where this is 1, fused AdamW changes nothing
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self.sharded:  # fused AdamW raises the versions of plain tensors alone
            torch.autograd.graph.increment_version(self.masters)
        if self.pairs:
            torch._foreach_copy_(*map(list, zip(*self.pairs, strict=True)))  # one launch for many weights
        return torch.where(finite, norm, torch.nan)

    def _clip(self, limit):
        """Scale the gradients down to a norm of at most `limit`, and return the norm before."""
        parts = [local(master.grad) for master in self.masters if master.grad is not None]
        if not self.sharded or not parts:
            return torch.nn.utils.clip_grad_norm_(self.masters, limit)
        mesh = self.masters[0].device_mesh
        square = torch.nn.utils.get_total_norm(parts).square().to(mesh.device_type)
        torch.distributed.all_reduce(square, group=mesh.get_group())
        norm = square.sqrt()
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch clips
        torch._foreach_mul_(parts, scale.to(parts[0].device))
        return norm

    def bytes_to_come(self) -> int:
        """Count the bytes that the gradients and, before the first step, the moments will still take.

        Returns:
            Bytes of all gradients and moments that are not allocated at present; of sharded ones this rank's parts.
        """
        states = [self.adamw.state.get(master, {}) for master in self.masters]
        missing = [sum(name not in state for name in ("exp_avg", "exp_avg_sq")) for state in states]
        sizes = [local(master.detach()).nbytes for master in self.masters]
        return sum(
            size * (count + (master.grad is None))
            for size, master, count in zip(sizes, self.masters, missing, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the fp32 masters of the parameters below fp32, and the state of AdamW.

        Returns:
            The state. Its tensors are the ones in use and not copies.
        """
        return {"masters": [master.detach() for _, master in self.pairs], "adamw": self.adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a saved state into the masters and into AdamW. The module's own weights are not touched.

        Args:
            state: What `state_dict` returned.
        """
        for (_, master), saved in zip(self.pairs, state["masters"], strict=True):
            master.copy_(saved)
        self.adamw.load_state_dict(state["adamw"])


def make_schedule(optimizer: MasterAdamW, name: str, *, warmup_steps: float, total_steps: int) -> LRScheduler:
    """Make one of transformers' learning-rate schedules.

    Args:
        optimizer: The optimizer whose learning rate is scheduled.
        name: The name of the schedule in transformers, such as "cosine".
        warmup_steps: The number of updates over which the learning rate rises from 0. A value between 0 and 1 is a
            share of `total_steps`.
        total_steps: The number of updates of the whole run.

    Returns:
        The schedule, to be stepped once after each update.

    Raises:
        ValueError: There is no schedule of this name, it needs other settings than these two, or it follows a metric.
    """
    if 0 < warmup_steps < 1:
        warmup_steps = round(warmup_steps * total_steps)
    try:
        schedule = get_scheduler(
            name, optimizer.adamw, num_warmup_steps=int(warmup_steps), num_training_steps=total_steps
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"lr_scheduler_type {name!r} cannot be used: {error}") from None
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            f"lr_scheduler_type {name!r} follows a metric and not the steps; choose another schedule, such as cosine"
        )
    return schedule


def check_schedule(name: str) -> None:
    """Check the name of a schedule before there is a model.

    Args:
        name: The name of the schedule in transformers.

    Raises:
        ValueError: `make_schedule` would refuse the name.
    """
    make_schedule(MasterAdamW(torch.nn.Linear(1, 1), learning_rate=1.0), name, warmup_steps=0, total_steps=1)
