"""One optimizer update over several micro-batches, which supervised training and GRPO share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fastgrpo.data.records import Sample
from fastgrpo.policy.batch import Batch
from fastgrpo.policy.dealing import Dealer
from fastgrpo.policy.model import Policy
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.run.profiling import StageTimer
from fastgrpo.step.optim import MasterAdamW


class Update(NamedTuple):
    """What an update did, on every rank the same.

    Attributes:
        norm: The gradient norm before clipping, a scalar tensor. It is 0 where there are no samples, and NaN where the
            loss or the gradient is not finite. In both cases the weights stay as they are, and only the schedule
            advances.
        loss: The loss, a scalar tensor; None where there are no samples.
    """

    norm: torch.Tensor
    loss: torch.Tensor | None


class Updater:
    """Feeds samples to a loss in micro-batches of a token budget, and steps the optimizer.

    The loss of a micro-batch must be a sum of terms weighted over the whole update (`Sample.weights`); then loss and
    gradient do not depend on how the update was split into micro-batches and over ranks. Gradients are summed over the
    ranks once, after the last micro-batch.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: MasterAdamW,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        *,
        max_grad_norm: float,
        max_tokens: int,
        share_prompt: bool = True,
        timer: StageTimer | None = None,
        ranks: Ranks = ALONE,
    ):
        self.policy, self.optimizer, self.schedule = policy, optimizer, schedule
        self.max_grad_norm = max_grad_norm
        self.dealer = Dealer(max_tokens, share_prompt, ranks, policy.lockstep)
        self.timer, self.ranks = timer or StageTimer(policy.device), ranks

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.schedule.get_last_lr()[0]

    def step(
        self,
        samples: Sequence[Sample],
        loss_fn: Callable[[list[int], Batch], torch.Tensor],
        idle_fn: Callable[[], torch.Tensor] | None = None,
    ) -> Update:
        """Update once."""
        total, device, share_prompt = None, self.policy.device, self.dealer.share_prompt
        with self.ranks.waiting("an update"):
            self.dealer.meet("the passes")
            for indices in self.dealer.passes(samples, self.dealer.shares(samples)):
                batch = Batch.pack([samples[i] for i in indices], device, share_prompt) if indices else None
                compute = partial(loss_fn, indices, batch) if indices else idle_fn or self.policy.idle_loss
                loss = self.policy.within(compute)
                with self.timer.stage("backward"):
                    loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
            if samples:
                total = self.optimizer.reduce(self.ranks, total)
            with self.timer.stage("optimizer"):
                norm = self.optimizer.step(self.max_grad_norm, total)
        self.schedule.step()
        return Update(norm, total)
