"""What the losses are given for `kl="full"`: the reference's hidden states and its head, in place of log-probs.

The KL of the full distributions needs all logits of the reference, so `linear_grpo_loss` alone takes it.
kernels/head_torch.py has the formula.
"""

from typing import TYPE_CHECKING, Any

import torch

from fastgrpo.kernels.head_torch import ReferenceHead
from fastgrpo.loss.objective import Objective
from fastgrpo.loss.values import check_constant

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def reference_head(
    objective: Objective, hidden: torch.Tensor, weight: torch.Tensor, ref_logps: Any, ref_hidden: Any, ref_weight: Any,
    ref_bias: Any, process_group: "ProcessGroup | None",
) -> ReferenceHead | None:  # fmt: skip
    """Check the reference that a caller of `linear_grpo_loss` gave, and take its head where the objective reads it.

    Args:
        objective: The objective of the loss.
        hidden: [..., D] the policy's hidden states.
        weight: [V, D] the policy's head.
        ref_logps: The reference's log-probs, or None.
        ref_hidden: [..., R] the reference's hidden states, or None.
        ref_weight: [V, R] the reference's head, or None.
        ref_bias: [V] the bias of that head, or None.
        process_group: The group over which the policy's head is sharded, or None.

    Raises:
        ValueError: Something that the KL of the full distributions needs is missing, has the wrong shape, device or
            kind of numbers, or requires grad; it was given something that it does not read, or another KL was given
            what it alone reads; or the head is sharded.
    """
    if objective.beta == 0:  # whatever is given of a reference is not read
        return None
    given = {"ref_hidden": ref_hidden, "ref_weight": ref_weight, "ref_bias": ref_bias}
    if not objective.full_kl:
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} is read by kl='full' alone, got kl={objective.kl!r}; pass ref_logps in its place"
                )
        return None
    if process_group is not None:
        raise ValueError(
            "kl='full' cannot be computed over a head that is sharded by process_group; pass the whole head, or choose "
            "an estimator, such as kl='k3'"
        )
    if ref_logps is not None:
        raise ValueError("ref_logps is not read by kl='full'; pass ref_hidden and ref_weight in its place")
    for name, value in given.items():
        if value is not None:
            check_constant(value, name, "floating point", hidden)
        elif name != "ref_bias":
            raise ValueError(f"beta={objective.beta} with kl='full' needs {name}; pass it, or beta=0")
    if ref_hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"ref_hidden must be [..., R] with the tokens {tuple(hidden.shape[:-1])} of hidden, got "
            f"{tuple(ref_hidden.shape)}"
        )
    shape = (weight.shape[0], ref_hidden.shape[-1])
    if ref_weight.shape != shape:
        raise ValueError(
            f"ref_weight must be [V, R]={shape}, V of weight and R of ref_hidden, got {tuple(ref_weight.shape)}"
        )
    if ref_bias is not None and ref_bias.shape != weight.shape[:1]:
        raise ValueError(f"ref_bias must be [V]={tuple(weight.shape[:1])}, got {tuple(ref_bias.shape)}")
    return ReferenceHead(ref_hidden.reshape(-1, ref_hidden.shape[-1]), ref_weight, ref_bias)


def refuse_full_kl(objective: Objective, given: str) -> None:
    """Refuse the KL of the full distributions in a loss that is not given the reference's head."""
    if objective.full_kl:
        raise ValueError(
            f"kl='full' cannot be computed from {given} and ref_logps: use linear_grpo_loss with ref_hidden and "
            "ref_weight, or an estimator, such as kl='k3'"
        )
