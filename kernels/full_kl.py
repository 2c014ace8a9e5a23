"""The KL of the full distributions, summed over the vocabulary, and its gradient by the policy's logits, by chunks.

    KL = sum_v p_v d_v,   d_v = log p_v - log q_v,   dKL/dz_v = p_v (d_v - KL)

p is the softmax of the policy's logits z and q that of the reference's, both divided by the temperature. The terms that
come from dd/dz cancel, because sum_v p_v dlog p_v = 0. No gradient flows to the reference.

Shapes: N tokens of the batch, n rows of the chunk (one a token), V vocabulary, R hidden size of the reference.
"""

from typing import NamedTuple

import torch


class ReferenceHead(NamedTuple):
    """What gives the reference's logits, which have the policy's soft-cap and temperature. Nothing carries gradient.

    Attributes:
        hidden: [N, R], the reference's state at each token of the batch.
        weight: [V, R].
        bias: [V] or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def full_kl(probs: torch.Tensor, ref_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute KL(p || q) of each row.

    A token that the policy rules out adds 0 (0 log 0), also where the reference rules it out too. One that the
    reference alone rules out makes the KL infinite.

    Args:
        probs: [n, V] the policy's probabilities p.
        ref_logits: [n, V] the reference's logits divided by the temperature. They become d.

    Returns:
        KL [n] in nats, and d [n, V], 0 where p is 0.
    """
    ref_logits -= ref_logits.logsumexp(-1, keepdim=True)  # log q: in logarithms, since q itself may underflow
    log_ratio = ref_logits.neg_().add_(probs.log()).masked_fill_(probs == 0, 0)  # d = log p - log q
    return (probs * log_ratio).sum(-1), log_ratio  # KL = sum_v p_v d_v


def full_kl_gradient_(probs: torch.Tensor, log_ratio: torch.Tensor, kl: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Turn d into the gradient by the policy's logits z, in place.

    Args:
        probs: [n, V] the policy's probabilities p.
        log_ratio: [n, V] d. It becomes g p (d - KL).
        kl: [n] KL of each row.
        g: [n] gradient of the KL.
    """
    return log_ratio.sub_(kl[:, None]).mul_(probs).mul_(g.to(probs.dtype)[:, None])  # g dKL/dz = g p (d - KL)
