"""Supervised training on completions, through the head that GRPO trains through.

    L = -(1 / T) sum over the T completion tokens of an update of log pi(token)

This is the policy gradient with a weight of 1 for every token: its gradient is that of GRPO's loss at an advantage of
1, a ratio of 1, and DAPO's normalization.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fastgrpo.data.examples import Example
from fastgrpo.data.records import Sample
from fastgrpo.policy.dealing import Dealer
from fastgrpo.policy.model import Policy
from fastgrpo.policy.reference import Scoring, score
from fastgrpo.run.health import MAX_SKIPPED
from fastgrpo.step.optim import MasterAdamW, make_schedule
from fastgrpo.step.update import Updater

MAX_TOKENS = 16384  # largest number of tokens of a micro-batch of a warm start


@dataclass(frozen=True)
class Learned:
    """What one supervised update did.

    Attributes:
        loss: The mean negative log-likelihood of the completion tokens before the update, in nats.
        norm: The gradient norm before clipping, a scalar tensor; NaN where the update was skipped.
        tokens: How many completion tokens were learned.
    """

    loss: float
    norm: torch.Tensor
    tokens: int


def learn(policy: Policy, updater: Updater, examples: Sequence[Example]) -> Learned:
    """Make one update on some examples."""
    samples = _samples(examples)
    tokens = sum(len(sample.completion_ids) for sample in samples)

    def loss_fn(_, batch):
        with updater.timer.stage("forward"):
            states = policy.completion_states(batch)
        with updater.timer.stage("loss"):
            return -policy.logps_of(states, batch.targets).sum() / tokens

    done = updater.step(samples, loss_fn)
    return Learned(done.loss.item(), done.norm, tokens)


@torch.no_grad()
def mean_loss(policy: Policy, examples: Sequence[Example], dealer: Dealer) -> float:
    """Measure the loss on examples that are not learned."""
    samples = _samples(examples)
    shares = dealer.shares(samples)
    mine, passes = [samples[i] for i in shares[dealer.ranks.rank]], dealer.agreed(samples, shares)
    dealer.meet("the passes of the held-out loss")
    logps = score(policy, mine, Scoring(1.0, dealer.max_tokens, dealer.share_prompt), passes)
    own = torch.cat(logps).double().sum().item() if logps else 0.0
    total = math.fsum(dealer.ranks.gather(own, "the held-out loss"))
    return -total / sum(len(sample.completion_ids) for sample in samples)


def _samples(examples):
    """Make the samples that a micro-batch is packed from."""
    return [Sample(example.prompt_ids, example.completion_ids, advantage=1.0) for example in examples]


def sft(
    policy: Policy,
    examples: Sequence[Example],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int = 0,
    max_grad_norm: float = 1.0,
    on_step: Callable[[int, float], bool | None] | None = None,
) -> None:
    """Warm-start a policy: learn examples, with a linear decay of the learning rate to zero."""
    if not examples:
        raise ValueError("sft needs at least one example")
    optimizer = MasterAdamW(policy.module, learning_rate=learning_rate)
    schedule = make_schedule(optimizer, "linear", warmup_steps=0.05, total_steps=steps)
    updater = Updater(policy, optimizer, schedule, max_grad_norm=max_grad_norm, max_tokens=MAX_TOKENS)
    rng, queue, norms = random.Random(seed), [], []
    for step in range(1, steps + 1):
        while len(queue) < batch_size:
            queue += rng.sample(range(len(examples)), len(examples))
        chosen, queue = queue[:batch_size], queue[batch_size:]
        learned = learn(policy, updater, [examples[i] for i in chosen])
        norms = [*norms, learned.norm][-MAX_SKIPPED:]
        if step % MAX_SKIPPED == 0 and torch.stack(norms).isnan().all():
            raise ValueError(f"{MAX_SKIPPED} updates in a row were not finite, and were skipped; lower learning_rate")
        if on_step is not None and on_step(step, learned.loss):
            return
