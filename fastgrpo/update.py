"""One optimizer update, shared by supervised training and GRPO: micro-batches, accumulate, clip, step."""

from fastgrpo.batch import Batch, split_by_tokens


class Updater:
    """Feeds samples to a loss in micro-batches of a token budget and steps the optimizer.

    The loss of a micro-batch must be a sum of terms weighted over the whole update (`Sample.weights`); then loss and
    gradient do not depend on how the update was split.
    """

    def __init__(self, optimizer, schedule, *, max_grad_norm, max_tokens, device):
        self.optimizer, self.schedule = optimizer, schedule
        self.max_grad_norm, self.max_tokens, self.device = max_grad_norm, max_tokens, device
        self.learning_rate = None  # of the last update

    def step(self, samples, loss_fn):
        """Update once.

        Args:
            samples: the `Sample`s of this update. loss_fn: (part, Batch) -> scalar loss to be summed over parts.

        Returns:
            the gradient norm before clipping, a scalar tensor; 0 where there were no samples: nothing moves then.
        """
        for part in split_by_tokens(samples, self.max_tokens):
            loss_fn(part, Batch.pack(part, self.device)).backward()
        norm = self.optimizer.step(self.max_grad_norm)
        self.learning_rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        return norm
