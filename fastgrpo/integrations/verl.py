"""The function of verl's fused head, with its name and signature, for code that calls verl.

verl (github.com/volcengine/verl) computes log-probs and entropy in `verl/utils/kernel/linear_cross_entropy.py` if fused
kernels are on. This module does not import verl.
"""

from typing import TYPE_CHECKING

import torch

from fastgrpo.loss.logprobs import linear_logprob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_REDUCED = {"none": lambda logps: logps, "sum": torch.sum, "mean": torch.mean}


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float | None = 1.0,
    reduction: str | None = "none", dist_process_group: "ProcessGroup | None" = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute log-probs and entropies under softmax(hidden @ weight.T / temperature), without logits in memory.

    Despite the name, and as in verl, the first result is the log-prob and not its negative.

    Args:
        hidden: [..., D] floating point, N states in all.
        weight: [V, D], the head. With `dist_process_group` the rows of this rank.
        labels: N integers in [0, V) of the whole vocabulary, in any shape.
        temperature: Temperature of the logits. None is 1.
        reduction: "none", "sum" or "mean" of the log-probs (case-insensitive); the entropies are never reduced. None is
            "none".
        dist_process_group: The group of torch.distributed over whose ranks the rows of the weight are sharded, in rank
            order, or None. Labels, hidden and results are the same on every rank. As in verl, the gradient of hidden is
            then the part of this rank's shard: the caller sums it over the group, as Megatron does when it gathers
            hidden states that are sharded by sequence.

    Returns:
        The log-probs, [N] or a scalar, and the entropies [N] in nats, both fp32 (fp64 for fp64 inputs) and
        differentiable by hidden and weight.

    Raises:
        ValueError: The reduction is unknown, or `linear_logprob` refuses the tensors.

    Source:
        verl/utils/kernel/linear_cross_entropy.py and kernels.py of verl.
    """
    reduction = "none" if reduction is None else reduction
    if reduction.lower() not in _REDUCED:
        raise ValueError(f"reduction must be one of {', '.join(_REDUCED)}, got {reduction!r}")
    logps, entropy = linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1),
        temperature=1.0 if temperature is None else temperature, return_entropy=True,
        process_group=dist_process_group, sum_hidden_grad=False,
    )  # fmt: skip
    return _REDUCED[reduction.lower()](logps), entropy
