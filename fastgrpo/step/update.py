"""One optimizer update, shared by supervised training and GRPO: micro-batches, accumulate, clip, step."""

from fastgrpo.policy.batch import Batch, split_by_tokens
from fastgrpo.run.profiling import StageTimer


class Updater:
    """Feeds samples to a loss in micro-batches of a token budget and steps the optimizer.

    The loss of a micro-batch must be a sum of terms weighted over the whole update (`Sample.weights`); then loss and
    gradient do not depend on how the update was split.
    """

    def __init__(self, optimizer, schedule, *, max_grad_norm, max_tokens, device, share_prompt=True, timer=None):
        """share_prompt: one prompt for neighbours that have the same. timer: a `StageTimer` that learns how long the
        passes took, or None."""
        self.optimizer, self.schedule = optimizer, schedule
        self.max_grad_norm, self.max_tokens, self.device = max_grad_norm, max_tokens, device
        self.share_prompt, self.timer = share_prompt, timer or StageTimer(device)
        self.learning_rate = None  # of the last update

    def step(self, samples, loss_fn):
        """Update once.

        Args:
            samples: the `Sample`s of this update. loss_fn: (part, Batch) -> scalar loss to be summed over parts.

        Returns:
            the gradient norm before clipping, a scalar tensor; 0 where there were no samples: nothing moves then. NaN
            where loss or gradient was not finite: then nothing moves either, but the schedule goes on.
        """
        total = None
        for part in split_by_tokens(samples, self.max_tokens, self.share_prompt):
            loss = loss_fn(part, Batch.pack(part, self.device, self.share_prompt))
            with self.timer.stage("backward"):
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        with self.timer.stage("optimizer"):
            norm = self.optimizer.step(self.max_grad_norm, total)
        self.learning_rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        return norm
