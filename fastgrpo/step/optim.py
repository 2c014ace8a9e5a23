"""AdamW with fp32 masters, and its schedule.

A bf16 weight has 8 bits of mantissa: an update below 1/256 of it is rounded away, which at learning rate 1e-6 is nearly
every update. So the module holds bf16 for speed, and the optimizer holds fp32 masters, gradients and states; after each
step the masters are copied into the same storage, which rollouts read.
"""

import torch
from transformers import get_scheduler


class MasterAdamW:
    """AdamW (arXiv 1711.05101) over a module's trainable parameters; those below fp32 get an fp32 master.

    Gradients of a low-precision parameter are added to its master's in fp32 as soon as they exist, so accumulation over
    micro-batches loses nothing and no second copy of the gradients stays.
    """

    def __init__(self, model, *, learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not named:
            raise ValueError(f"{type(model).__name__} has no trainable parameters")
        self.pairs = []  # (parameter, master) where they differ
        masters = [self._master(parameter) for parameter in named.values()]
        # Norms and biases are not decayed, as everywhere.
        groups = [
            {"params": [m for m in masters if m.ndim >= 2], "weight_decay": weight_decay},
            {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
        ]
        self.masters = masters
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=learning_rate, betas=betas, eps=eps, fused=True
        )

    def _master(self, parameter):
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        master = parameter.detach().float().requires_grad_()
        self.pairs.append((parameter, master))

        def move(parameter):
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(move)
        return master

    @torch.no_grad()
    def step(self, max_grad_norm=0.0, loss=None):
        """Clip (0 is off), update the masters, copy them into the module.

        Where the gradient's norm, or the loss (a scalar tensor), is not finite, weights and states stay as they are.
        The host does not wait to learn of it.

        Returns:
            the norm before clipping, a scalar tensor on the masters' device; NaN where the update was skipped.
        """
        limit = max_grad_norm if max_grad_norm > 0 else torch.inf
        norm = torch.nn.utils.clip_grad_norm_(self.masters, limit)
        norm = norm.to(self.masters[0].device)  # where no gradient was, torch makes the norm on the CPU
        finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite()
        self.adamw.found_inf = (~finite).float()  # where it is 1, fused AdamW is a no-op
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        for parameter, master in self.pairs:
            parameter.copy_(master)
        return torch.where(finite, norm, torch.nan)

    def bytes_to_come(self):
        """Of the gradients, and before the first step of the two moments: they will be there, and are not yet."""
        states = [self.adamw.state.get(master, {}) for master in self.masters]
        missing = [sum(name not in state for name in ("exp_avg", "exp_avg_sq")) for state in states]
        return sum(m.nbytes * (count + (m.grad is None)) for m, count in zip(self.masters, missing, strict=True))

    def state_dict(self):
        """fp32 masters of the parameters below fp32, and AdamW's own state. The tensors are the ones in use."""
        return {"masters": [master.detach() for _, master in self.pairs], "adamw": self.adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state):
        """Undo `state_dict`; the module's own weights are not touched."""
        for (_, master), saved in zip(self.pairs, state["masters"], strict=True):
            master.copy_(saved)
        self.adamw.load_state_dict(state["adamw"])


def make_schedule(optimizer, name, *, warmup_steps, total_steps):
    """transformers' learning-rate schedule of this name. warmup_steps below 1 is a share of total_steps.

    Raises:
        ValueError: there is no schedule of this name, or it needs more than warmup and total steps.
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
        raise ValueError(f"lr_scheduler_type {name!r} follows a metric, not the steps; choose another, such as cosine")
    return schedule


def check_schedule(name):
    """Raises ValueError as `make_schedule` would, before there is a model."""
    make_schedule(MasterAdamW(torch.nn.Linear(1, 1), learning_rate=1.0), name, warmup_steps=0, total_steps=1)
