"""Supervised training on completions: the warm start before GRPO."""

import random
from collections.abc import Callable, Sequence

import torch

from fastgrpo.data.examples import Example
from fastgrpo.data.records import Sample
from fastgrpo.policy.model import Policy
from fastgrpo.run.health import MAX_SKIPPED
from fastgrpo.step.optim import MasterAdamW, make_schedule
from fastgrpo.step.update import Updater

MAX_TOKENS = 16384  # largest number of tokens of a micro-batch


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
    """Minimize the mean negative log-likelihood of completion tokens, with a linear decay of the learning rate to zero.

    Args:
        policy: The policy that is trained.
        examples: What is learned, see `to_examples`.
        steps: How many updates.
        batch_size: Examples in each update, drawn in shuffled epochs.
        learning_rate: The learning rate at the start.
        seed: Decides the order of the examples.
        max_grad_norm: Gradients are clipped to this norm; 0 is off.
        on_step: A function that is called with (step, loss) after each update, and ends the training by returning True.
            None calls nothing.

    Raises:
        ValueError: There are no examples, or `MAX_SKIPPED` updates in a row were not finite.
    """
    if not examples:
        raise ValueError("sft needs at least one example")
    optimizer = MasterAdamW(policy.module, learning_rate=learning_rate)
    schedule = make_schedule(optimizer, "linear", warmup_steps=0.05, total_steps=steps)
    updater = Updater(optimizer, schedule, max_grad_norm=max_grad_norm, max_tokens=MAX_TOKENS, device=policy.device)
    rng, queue, norms = random.Random(seed), [], []
    for step in range(1, steps + 1):
        while len(queue) < batch_size:
            queue += rng.sample(range(len(examples)), len(examples))
        chosen, queue = queue[:batch_size], queue[batch_size:]
        samples = [Sample(examples[i].prompt_ids, examples[i].completion_ids, advantage=1.0) for i in chosen]
        tokens = sum(len(sample.completion_ids) for sample in samples)
        losses = []

        def loss_fn(part, batch, tokens=tokens, losses=losses):
            loss = -policy.logps(batch).sum() / tokens
            losses.append(loss.detach())
            return loss

        norms = [*norms, updater.step(samples, loss_fn)][-MAX_SKIPPED:]
        if step % MAX_SKIPPED == 0 and torch.stack(norms).isnan().all():
            raise ValueError(f"{MAX_SKIPPED} updates in a row were not finite, and were skipped; lower learning_rate")
        if on_step is not None and on_step(step, torch.stack(losses).sum().item()):
            return
