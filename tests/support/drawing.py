"""Prompts, engines that refill their lanes, their completions, and the greedy completions of transformers."""

import torch

from fastgrpo.rollout.engine import RolloutEngine

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]


def engine_of(attention):
    """Engines whose lanes are refilled (5 at most) and whose prompts are shared, or stand in front of each lane."""
    return lambda model, max_num_seqs=256: RolloutEngine(model, max_num_seqs=max_num_seqs, attention=attention)


def ids_of(rollouts):
    return [rollout.ids for rollout in rollouts]


def finish(engine, most=1000):
    """The completions of all requests, by number, within so many steps."""
    outputs = {}
    for _ in range(most):
        outputs |= engine.step()
        if not engine.has_unfinished_requests():
            return outputs
    raise AssertionError(f"requests are left after {most} steps")


def greedy_of_transformers(model, prompt, max_tokens, stop, penalty=1.0):
    ids = torch.tensor([prompt])
    how = {"do_sample": False, "max_new_tokens": max_tokens, "eos_token_id": list(stop) or None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), repetition_penalty=penalty, **how)
    return out[0, len(prompt) :].tolist()
