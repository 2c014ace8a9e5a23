"""One optimizer update over several micro-batches, which supervised training and GRPO share."""

from collections.abc import Callable, Sequence

import torch

from fastgrpo.data.records import Sample
from fastgrpo.policy.batch import Batch
from fastgrpo.policy.microbatches import micro_batches
from fastgrpo.run.profiling import StageTimer
from fastgrpo.step.optim import MasterAdamW


class Updater:
    """Feeds samples to a loss in micro-batches of a token budget, and steps the optimizer.

    The loss of a micro-batch must be a sum of terms weighted over the whole update (`Sample.weights`); then loss and
    gradient do not depend on how the update was split.

    Args:
        optimizer: The optimizer.
        schedule: Its learning-rate schedule, one step an update.
        max_grad_norm: Gradients are clipped to this norm; 0 is off.
        max_tokens: The token budget of a micro-batch.
        device: Where micro-batches go.
        share_prompt: Whether neighbours with the same prompt share its tokens.
        timer: The timer that measures the passes. None makes one that is not read.
    """

    def __init__(
        self,
        optimizer: MasterAdamW,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        *,
        max_grad_norm: float,
        max_tokens: int,
        device: torch.device,
        share_prompt: bool = True,
        timer: StageTimer | None = None,
    ):
        self.optimizer, self.schedule = optimizer, schedule
        self.max_grad_norm, self.max_tokens, self.device = max_grad_norm, max_tokens, device
        self.share_prompt, self.timer = share_prompt, timer or StageTimer(device)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.schedule.get_last_lr()[0]

    def step(self, samples: Sequence[Sample], loss_fn: Callable[[list[int], Batch], torch.Tensor]) -> torch.Tensor:
        """Update once.

        Args:
            samples: What this update trains on.
            loss_fn: (indices of the samples of a micro-batch, their `Batch`) -> scalar loss, to be summed over
                micro-batches. `micro_batches` decides which samples go together.

        Returns:
            The gradient norm before clipping, a scalar tensor. It is 0 where there are no samples, and NaN where the
            loss or the gradient is not finite. In both cases the weights stay as they are, and only the schedule
            advances.
        """
        total = None
        for indices in micro_batches(samples, self.max_tokens, self.share_prompt):
            loss = loss_fn(indices, Batch.pack([samples[i] for i in indices], self.device, self.share_prompt))
            with self.timer.stage("backward"):
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        with self.timer.stage("optimizer"):
            norm = self.optimizer.step(self.max_grad_norm, total)
        self.schedule.step()
        return norm
