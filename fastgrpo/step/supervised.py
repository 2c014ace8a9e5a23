"""Supervised training on completions: the warm start before GRPO, and a stage of its own."""

import random

import torch

from fastgrpo.data.records import Sample
from fastgrpo.loss import linear_logprob
from fastgrpo.policy.model import completion_states, head
from fastgrpo.run.health import MAX_SKIPPED
from fastgrpo.step.optim import MasterAdamW, make_schedule
from fastgrpo.step.update import Updater


def sft(model, examples, *, steps, batch_size, learning_rate, seed=0, max_grad_norm=1.0, max_tokens=16384,
        on_step=None):  # fmt: skip
    """Minimize the mean negative log-likelihood of completion tokens, with a linear decay to zero.

    Args:
        model: a prepared policy. examples: (prompt ids, completion ids) pairs, the stop token included.
        steps, batch_size: updates, and examples in each, drawn in shuffled epochs. learning_rate: at the start.
        on_step: called with (step, loss) after each update, or None; training ends where it returns True.

    Raises:
        ValueError: no examples, or `MAX_SKIPPED` updates in a row were not finite.
    """
    if not examples:
        raise ValueError("sft needs at least one example")
    optimizer = MasterAdamW(model, learning_rate=learning_rate)
    schedule = make_schedule(optimizer, "linear", warmup_steps=0.05, total_steps=steps)
    updater = Updater(optimizer, schedule, max_grad_norm=max_grad_norm, max_tokens=max_tokens, device=model.device)
    weight, bias = head(model)
    rng, queue, norms = random.Random(seed), [], []
    for step in range(1, steps + 1):
        while len(queue) < batch_size:
            queue += rng.sample(range(len(examples)), len(examples))
        chosen, queue = queue[:batch_size], queue[batch_size:]
        samples = [Sample(*examples[i], advantage=1.0) for i in chosen]
        tokens = sum(len(sample.completion_ids) for sample in samples)
        losses = []

        def loss_fn(part, batch, tokens=tokens, losses=losses):
            logps = linear_logprob(completion_states(model, batch), weight, batch.targets, bias=bias)
            loss = -logps.sum() / tokens
            losses.append(loss.detach())
            return loss

        norms = [*norms, updater.step(samples, loss_fn)][-MAX_SKIPPED:]
        if step % MAX_SKIPPED == 0 and torch.stack(norms).isnan().all():
            raise ValueError(f"{MAX_SKIPPED} updates in a row were not finite, and were skipped; lower learning_rate")
        if on_step is not None and on_step(step, torch.stack(losses).sum().item()):
            return
