"""Random batches for the head: hidden states, weight and targets of a GRPO loss, and its true gradients in fp64.

Shapes: N tokens, V vocabulary, D hidden; N / length sequences of equal length.
"""

from typing import NamedTuple

import torch

from fastgrpo import Objective
from fastgrpo.kernels import reference

LOGIT_STD = 7.0  # an entropy of 1.9 nats at V = 151936, closer to a trained model than the 11 of unit logits
LOG_RATIOS = (-0.5, -0.05, 0.05, 0.5)  # far from the clip range, so that rounding does not matter
TOKENS_AT_ONCE = 256  # tokens with full logits in memory, when a batch is drawn and when the truth is computed
OBJECTIVE = Objective()


class Batch(NamedTuple):
    """The inputs of one GRPO step over the head."""

    hidden: torch.Tensor  # [N, D], requires grad
    weight: torch.Tensor  # [V, D], requires grad
    targets: torch.Tensor  # [N] token ids
    advantages: torch.Tensor  # [N] floats, equal for all tokens of a sequence
    old_logps: torch.Tensor  # [N] fp32 log-probs of the targets under the policy that drew them
    mask: torch.Tensor  # [N] bool, True for active tokens
    rows: torch.Tensor  # [M] indices of the active tokens, on the host
    length: int  # tokens of a sequence

    def masked(self, share: float) -> "Batch":
        """Return the same batch with a share of its tokens active, spread evenly; 1 is all tokens."""
        position = torch.arange(len(self.mask))
        mask = ((position + 1) * share).long() > (position * share).long()
        mask |= share >= 1
        return self._replace(mask=mask.to(self.mask.device), rows=mask.nonzero()[:, 0])


def make_batch(n: int, d: int, v: int, *, length: int, dtype: torch.dtype, device: str | torch.device) -> Batch:
    """Draw hidden states [n, d] and a head [v, d], and the targets from their distribution. All tokens are active."""
    torch.manual_seed(0)
    hidden = torch.randn(n, d, device=device).to(dtype)
    weight = (torch.randn(v, d, device=device) * (LOGIT_STD / d**0.5)).to(dtype)
    targets, logps = [], []
    for part in hidden.split(TOKENS_AT_ONCE):
        logp = torch.log_softmax(part.float() @ weight.float().T, -1)
        targets.append((logp - torch.empty_like(logp).exponential_().log_()).argmax(-1))  # Gumbel-max
        logps.append(logp.gather(-1, targets[-1][:, None])[:, 0])
    log_ratios = torch.tensor(LOG_RATIOS, device=device)[torch.randint(len(LOG_RATIOS), (n,), device=device)]
    advantages = torch.randn(n // length, device=device).repeat_interleave(length)
    return Batch(
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(),
        targets=torch.cat(targets),
        advantages=advantages,
        old_logps=torch.cat(logps) - log_ratios,
        mask=torch.ones(n, dtype=torch.bool, device=device),
        rows=torch.arange(n),
        length=length,
    )


class Truth(NamedTuple):
    """Results of an exact head, in fp64."""

    logps: torch.Tensor  # [N] log-probs of the targets, 0 for inactive tokens
    hidden: torch.Tensor  # [N, D] gradient of the hidden states
    weight: torch.Tensor  # [V, D] gradient of the weight


def truth(batch: Batch) -> Truth:
    """Compute the gradients of the loss in fp64 by autograd through kernels/reference.py, a few tokens at a time."""
    hidden, weight = batch.hidden.detach().double(), batch.weight.detach().double().requires_grad_()
    result = Truth(hidden.new_zeros(len(hidden)), torch.zeros_like(hidden), torch.zeros_like(weight))
    for rows in batch.rows.to(hidden.device).split(TOKENS_AT_ONCE):
        part = hidden[rows].requires_grad_()
        logps = reference.linear_logprob(part, weight, batch.targets[rows])
        weights = torch.full_like(logps, 1 / len(batch.rows))
        old, advantages = batch.old_logps[rows].double(), batch.advantages[rows].double()
        loss = reference.policy_loss(logps, old, None, advantages, weights, OBJECTIVE)[0]
        result.logps[rows] = logps.detach()
        dh, dw = torch.autograd.grad(loss, (part, weight))
        result.hidden[rows] = dh
        result.weight.add_(dw)
    return result


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference relative to the norm of the expected tensor in fp64."""
    return ((value.double() - expected).norm() / expected.norm()).item()
