"""The reference policy: none, or a frozen copy of the policy as it was when training began."""

import copy

import torch

from fastgrpo.batch import Batch, split_by_tokens
from fastgrpo.loss import linear_logprob
from fastgrpo.model import completion_states, head


def make_reference(model, beta):
    """None when beta is 0 (nothing in memory); else a copy without gradients."""
    if beta == 0:
        return None
    reference = copy.deepcopy(model).requires_grad_(False)
    return reference.eval()


@torch.no_grad()
def score(model, samples, temperature, max_tokens):
    """Log-probs of each sample's completion under `model`, fp32 [len(completion_ids)] on the model's device.

    Args:
        samples: `Sample`s. temperature: the one they were drawn at. max_tokens: budget of a micro-batch.
    """
    weight, bias = head(model)
    logps = []
    for part in split_by_tokens(samples, max_tokens):
        batch = Batch.pack(part, weight.device)
        states = completion_states(model, batch)
        flat = linear_logprob(states, weight, batch.targets, bias=bias, temperature=temperature)
        logps += flat.split([len(sample.completion_ids) for sample in part])
    return logps
