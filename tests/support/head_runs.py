"""Runs of the head's kernels on a random head, for the interpreted tests of log-probs and of the fused loss."""

import torch

from fastgrpo.kernels import head as head_kernels
from fastgrpo.kernels import launch

OPTIONS = [
    {},
    {"bias": True},
    {"temperature": 0.7},
    {"temperature": "row"},
    {"softcap": 5.0},
    {"bias": True, "temperature": "row", "softcap": 5.0, "scale": 3.0},
]


def run_logprob(head, *, entropy=True, chunk_rows=launch.CHUNK_ROWS):
    """Return log-probs, entropy and their gradients for the head's grad_logps and grad_entropy."""
    leaves = head.leaves()
    logps, h = head_kernels.linear_logprob(
        leaves["hidden"], leaves["weight"], head.targets, bias=leaves.get("bias"), temperature=head.temperature,
        softcap=head.softcap, return_entropy=entropy, chunk_rows=chunk_rows,
    )  # fmt: skip
    loss = weighted(head, entropy)(logps, h)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return {"logps": logps, **({"entropy": h} if entropy else {}), **grads}


def weighted(head, entropy=True):
    """Return the scalar function of log-probs and entropy whose gradients are the head's."""

    def scalar(logps, h):
        loss = (logps * head.grad_logps.to(logps.dtype)).sum()
        return loss + (h * head.grad_entropy.to(logps.dtype)).sum() if entropy else loss

    return scalar


def run_grpo(head, objective, *, chunk_rows=launch.CHUNK_ROWS, factor=1.0, **fields):
    """Return loss, log-probs and gradients of the fused loss, the gradients times `factor`."""
    leaves = head.leaves()
    loss, outputs = head_kernels.linear_grpo_loss(
        leaves["hidden"], leaves["weight"], leaves.get("bias"), head.rows(objective, **fields), objective,
        softcap=head.softcap, chunk_rows=chunk_rows,
    )  # fmt: skip
    grads = torch.autograd.grad(loss * factor, list(leaves.values()))
    return {"loss": loss, "logps": outputs["logps"], **dict(zip(leaves, grads, strict=True))}
