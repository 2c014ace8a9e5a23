"""Heads to try the Triton kernels on, their truth, and the tolerance of fastgrpo/kernel_checks/cases.py.

Shapes: N tokens, V vocabulary, D hidden, S sequences.
"""

from dataclasses import dataclass, replace

import torch

from fastgrpo.kernel_checks import cases
from fastgrpo.kernel_checks.cases import gradients
from fastgrpo.kernels import reference
from fastgrpo.kernels.objectives import PolicyRows

MOST_LOGITS = 2**26  # from this many logits on, targets are random ones and there are no old log-probs


@dataclass
class Head:
    """A head and what the loss reads of its tokens; every tensor on one device, hidden and weight in one dtype."""

    hidden: torch.Tensor  # [N, D]
    weight: torch.Tensor  # [V, D]
    targets: torch.Tensor  # [N] int64
    advantages: torch.Tensor  # [N] fp32
    weights: torch.Tensor  # [N] fp32, of the tokens
    old_logps: torch.Tensor | None  # [N]
    ref_logps: torch.Tensor | None  # [N]
    lengths: torch.Tensor  # [S] tokens of each sequence
    bias: torch.Tensor | None = None  # [V]
    temperature: float | torch.Tensor = 1.0  # or [N]
    softcap: float | None = None
    grad_logps: torch.Tensor | None = None  # [N]
    grad_entropy: torch.Tensor | None = None  # [N]

    def rows(self, objective, **fields):
        coupled = objective.couples_tokens(fields.get("sampler_logps") is not None)
        return PolicyRows(
            index=None, targets=self.targets, temperature=self.temperature, advantages=self.advantages,
            weights=self.weights, old_logps=self.old_logps, ref_logps=self.ref_logps if objective.beta else None,
            lengths=self.lengths if coupled else None, **fields,
        )  # fmt: skip

    def leaves(self):
        """Fresh leaves of hidden, weight and bias that require grad, by name."""
        tensors = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {k: v.detach().clone().requires_grad_() for k, v in tensors.items() if v is not None}


def random_head(n, d, v, dtype=torch.float32, *, bias=False, temperature=1.0, softcap=None, scale=1.0, seed=0,
                device="cpu"):  # fmt: skip
    """Draw a head whose targets are likely ones for half of the tokens."""
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, device=device)

    hidden, weight = randn(n, d).to(dtype), (randn(v, d) * scale / d**0.5).to(dtype)
    targets = torch.randint(v, (n,), generator=g, device=device)
    if n * v < MOST_LOGITS:
        targets[::2] = (hidden.float() @ weight.float().T)[::2].argmax(-1)
    if temperature == "row":
        temperature = torch.rand(n, generator=g, device=device) + 0.5
    lengths = torch.tensor([n // 7, 0, n // 3, n - n // 7 - n // 3], device=device)
    head = Head(hidden, weight, targets, randn(n), torch.rand(n, generator=g, device=device) / n, None, None,
                lengths, randn(v).to(dtype) if bias else None, temperature, softcap, randn(n), randn(n))  # fmt: skip
    if n * v >= MOST_LOGITS:
        return head
    logps = reference.linear_logprob(
        hidden.double(), weight.double(), targets, bias=None if head.bias is None else head.bias.double(),
        logit_softcap=softcap, temperature=temperature,
    ).float()  # fmt: skip
    return replace(head, old_logps=logps + 0.3 * randn(n), ref_logps=logps + 0.3 * randn(n))


def truth_of(leaves, targets, scalar, *, temperature=1.0, softcap=None):
    """Compute log-probs and entropy by the reference, the loss that `scalar` makes of them, and its gradients."""
    logps, entropy = reference.linear_logprob(
        leaves["hidden"], leaves["weight"], targets, bias=leaves.get("bias"), logit_softcap=softcap,
        temperature=temperature, return_entropy=True,
    )  # fmt: skip
    loss = scalar(logps, entropy)
    return {"logps": logps.detach(), "entropy": entropy.detach(), "loss": loss.detach(), **gradients(loss, leaves)}


def policy_loss(logps, rows, objective):
    """Compute reference.policy_loss of kept tokens, in the dtype of the log-probs."""
    given = rows.old_logps, rows.ref_logps, rows.advantages, rows.weights, rows.sampler_logps
    old, ref, advantages, weights, sampler = (None if x is None else x.to(logps.dtype) for x in given)
    return reference.policy_loss(logps, old, ref, advantages, weights, objective, rows.lengths, sampler)


def scalar_of(rows, objective):
    """The loss of an objective, with its entropy bonus, as a function of log-probs and entropy."""

    def scalar(logps, entropy):
        loss, bonus = policy_loss(logps, rows, objective)[0], rows.entropy_weights
        return loss if bonus is None else loss - (bonus.to(logps.dtype) * entropy).sum()  # - sum_n e_n H_n

    return scalar


def _loss_of(head, scalar):
    def loss_of(logits):
        found = reference.logits_logprob(logits, head.targets, temperature=head.temperature, return_entropy=True)
        return {"loss": scalar(*found), "logps": found[0], "entropy": found[1]}

    return loss_of


def truth(head, scalar):
    """Log-probs, entropy, the loss that `scalar` makes of them, and its gradients, in fp64."""
    return cases.exact(head.leaves(), head.softcap, _loss_of(head, scalar))


def check(ours, head, scalar):
    """Compare some of truth's entries with those in the inputs' dtype with fp32 logits."""
    plain = cases.plain(head.leaves(), head.softcap, _loss_of(head, scalar))
    for name, (mine, bound) in cases.judge(ours, truth(head, scalar), plain).items():
        assert mine <= bound, (name, mine, bound)


def run_logprob(head, *, entropy=True, chunk_rows=8192):
    """Return log-probs, entropy and their gradients for the head's grad_logps and grad_entropy."""
    from fastgrpo.kernels import head as head_kernels

    leaves = head.leaves()
    logps, h = head_kernels.linear_logprob(
        leaves["hidden"], leaves["weight"], head.targets, bias=leaves.get("bias"), temperature=head.temperature,
        softcap=head.softcap, return_entropy=entropy, chunk_rows=chunk_rows,
    )  # fmt: skip
    found = {"logps": logps, "entropy": h} if entropy else {"logps": logps}
    return found | gradients(weighted(head, entropy)(logps, h), leaves)


def weighted(head, entropy=True):
    """Return the scalar function of log-probs and entropy whose gradients are the head's."""

    def scalar(logps, h):
        loss = (logps * head.grad_logps.to(logps.dtype)).sum()
        return loss + (h * head.grad_entropy.to(logps.dtype)).sum() if entropy else loss

    return scalar


def run_grpo(head, objective, *, chunk_rows=8192, factor=1.0, **fields):
    """Return loss, log-probs and gradients of the fused loss, the gradients times `factor`."""
    from fastgrpo.kernels import head as head_kernels

    leaves = head.leaves()
    loss, outputs = head_kernels.linear_grpo_loss(
        leaves["hidden"], leaves["weight"], leaves.get("bias"), head.rows(objective, **fields), objective,
        softcap=head.softcap, chunk_rows=chunk_rows,
    )  # fmt: skip
    return {"loss": loss, "logps": outputs["logps"], **gradients(loss * factor, leaves)}


def check_grpo(head, objective, chunk_rows=8192, **fields):
    """Check the fused loss, and return what `run_grpo` does."""
    ours = run_grpo(head, objective, chunk_rows=chunk_rows, **fields)
    check(ours, head, scalar_of(head.rows(objective, **fields), objective))
    return ours
