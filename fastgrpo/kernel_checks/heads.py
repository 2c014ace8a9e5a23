"""Random heads to try the kernels of the losses on, their truth in fp64, and the tolerance that they are held to.

The truth is kernels/reference.py on full logits in fp64, differentiated by autograd. Plain is PyTorch in the inputs'
dtype with fp32 logits: fp32 accumulation, dz rounded to the inputs' dtype for its two products, as autograd rounds it.
A kernel may err 1.1 times as much as plain in log-probs and dH and 1.5 times in dW, plus 1e-5. Errors of log-probs are
absolute (nats, or relative past one nat), those of gradients relative in norm.

Shapes: N tokens, V vocabulary, D hidden, S sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastgrpo.kernels import reference
from fastgrpo.kernels.objectives import PolicyRows

SLACK = 1e-5
FACTORS = {"logps": 1.1, "entropy": 1.1, "hidden": 1.1, "weight": 1.5, "bias": 1.5, "logits": 1.1, "loss": 1.1}
MOST_LOGITS = 2**26  # above this many logits, targets are random ones and there are no old log-probs

Scalar = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (log-probs, entropy) -> a loss


@dataclass
class Head:
    """A head and what the loss reads of its tokens; every tensor on one device, hidden and weight in one dtype.

    Attributes:
        hidden: [N, D] hidden states.
        weight: [V, D] weight of the head.
        targets: [N] int64 token ids.
        advantages: [N] fp32.
        weights: [N] fp32 weights of the tokens.
        old_logps: [N] log-probs under the policy that drew the tokens, or None.
        ref_logps: [N] log-probs under the reference, or None.
        lengths: [S] tokens of each sequence.
        bias: [V] or None.
        temperature: A float, or [N].
        softcap: Cap of the logits, or None.
        grad_logps: [N] a gradient of the log-probs to try.
        grad_entropy: [N] a gradient of the entropies to try.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor | None
    lengths: torch.Tensor
    bias: torch.Tensor | None = None
    temperature: float | torch.Tensor = 1.0
    softcap: float | None = None
    grad_logps: torch.Tensor | None = None
    grad_entropy: torch.Tensor | None = None

    def rows(self, objective: Any, **fields: Any) -> PolicyRows:
        """Return what the loss reads of the tokens."""
        coupled = objective.couples_tokens(fields.get("sampler_logps") is not None)
        return PolicyRows(
            index=None, targets=self.targets, temperature=self.temperature, advantages=self.advantages,
            weights=self.weights, old_logps=self.old_logps, ref_logps=self.ref_logps if objective.beta else None,
            lengths=self.lengths if coupled else None, **fields,
        )  # fmt: skip

    def leaves(self) -> dict[str, torch.Tensor]:
        """Return fresh leaves of hidden, weight and bias that require grad, by name."""
        tensors = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {k: v.detach().clone().requires_grad_() for k, v in tensors.items() if v is not None}


def random_head(
    n: int, d: int, v: int, dtype: torch.dtype = torch.float32, *, bias: bool = False,
    temperature: float | str = 1.0, softcap: float | None = None, scale: float = 1.0, seed: int = 0,
    device: str | torch.device = "cpu",
) -> Head:  # fmt: skip
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
    head = Head(hidden, weight, targets, randn(n), torch.rand(n, generator=g, device=device) / n, None, None,
                _ragged(n).to(device), randn(v).to(dtype) if bias else None, temperature, softcap, randn(n),
                randn(n))  # fmt: skip
    if n * v < MOST_LOGITS:
        logps = reference.linear_logprob(
            hidden.double(), weight.double(), targets, bias=None if head.bias is None else head.bias.double(),
            logit_softcap=softcap, temperature=temperature,
        ).float()  # fmt: skip
        head = replace(head, old_logps=logps + 0.3 * randn(n), ref_logps=logps + 0.3 * randn(n))
    return head


def _ragged(n):
    """Sequence lengths that sum to n: ragged, with an empty one."""
    first, second = n // 7, n // 3
    return torch.tensor([first, 0, second, n - first - second])


def truth_of(
    leaves: dict[str, torch.Tensor], targets: torch.Tensor, scalar: Scalar, *,
    temperature: float | torch.Tensor = 1.0, softcap: float | None = None, grad_output: float = 1.0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Compute log-probs and entropy by reference.py, the loss that `scalar` makes of them, and its gradients.

    Args:
        leaves: hidden [N, D], weight [V, D] and maybe bias [V], which require grad. Their dtype is that of the
            arithmetic (fp32 for 16-bit ones).
        targets: [N] int64.
        scalar: The loss, a function of log-probs and entropy.
        temperature: A float, or [N].
        softcap: Cap of the logits, or None.
        grad_output: Gradient of the loss.
    """
    logps, entropy = reference.linear_logprob(
        leaves["hidden"], leaves["weight"], targets, bias=leaves.get("bias"), logit_softcap=softcap,
        temperature=temperature, return_entropy=True,
    )  # fmt: skip
    loss = scalar(logps, entropy)
    grads = torch.autograd.grad(loss, list(leaves.values()), torch.full_like(loss, grad_output))
    found = {"logps": logps.detach(), "entropy": entropy.detach(), "loss": loss.detach()}
    return {**found, **dict(zip(leaves, grads, strict=True))}


def policy_loss(logps: torch.Tensor, rows: PolicyRows, objective: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute reference.policy_loss of kept tokens, in the dtype of the log-probs.

    Args:
        logps: [M] log-probs.
        rows: The kept tokens.
        objective: An Objective.
    """
    old, ref, advantages, weights, sampler = (
        None if x is None else x.to(logps.dtype)
        for x in (rows.old_logps, rows.ref_logps, rows.advantages, rows.weights, rows.sampler_logps)
    )
    return reference.policy_loss(logps, old, ref, advantages, weights, objective, rows.lengths, sampler)


def policy_scalar(rows: PolicyRows, objective: Any) -> Scalar:
    """Return the loss of an objective, with its entropy bonus, as a function of log-probs and entropy."""

    def scalar(logps: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        loss, _ = policy_loss(logps, rows, objective)
        bonus = rows.entropy_weights
        return loss if bonus is None else loss - (bonus.to(logps.dtype) * entropy).sum()  # - sum_n e_n H_n

    return scalar


def truth(head: Head, scalar: Scalar) -> dict[str, torch.Tensor]:
    """Compute `truth_of` a head in fp64."""
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in head.leaves().items()}
    return truth_of(leaves, head.targets, scalar, temperature=head.temperature, softcap=head.softcap)


def plain(head: Head, scalar: Scalar) -> dict[str, torch.Tensor]:
    """Compute the same in the inputs' dtype with fp32 logits; see the module docstring."""
    dtype = head.hidden.dtype
    x = _product(head.hidden, head.weight.T).requires_grad_()
    y = x if head.bias is None else x + head.bias.float()
    y = y if head.softcap is None else head.softcap * torch.tanh(y / head.softcap)
    logps, entropy = reference.logits_logprob(y, head.targets, temperature=head.temperature, return_entropy=True)
    loss = scalar(logps, entropy)
    (dz,) = torch.autograd.grad(loss, x)
    dz = dz.to(dtype)
    grads = {"hidden": _product(dz, head.weight).to(dtype), "weight": _product(dz.T, head.hidden).to(dtype)}
    if head.bias is not None:
        grads["bias"] = dz.float().sum(0).to(dtype)
    return {"logps": logps, "entropy": entropy, "loss": loss, **grads}


def _product(left, right):
    """Return a product in fp32. On a GPU 16-bit operands go through its matrix units, as those of the kernels do."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the Euclidean norm.

    Args:
        actual: What was computed.
        expected: The truth, in fp64.
    """
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def error(name: str, value: torch.Tensor, true: torch.Tensor) -> float:
    """Return the largest error of log-probs, entropy and loss, in nats or relative past one nat; of gradients the norm.

    Args:
        name: A key of `FACTORS`.
        value: What was computed.
        true: The truth, in fp64.
    """
    value, true = value.detach().double(), true.detach().double()
    if name in ("logps", "entropy", "loss"):
        return ((value - true).abs() / true.abs().clamp(min=1)).max().item() if true.numel() else 0.0
    return relative_error(value, true)


def judge(ours: dict[str, torch.Tensor], head: Head, scalar: Scalar) -> dict[str, tuple[float, float]]:
    """Compare what a kernel computed with the truth and with plain PyTorch."""
    true, simple = truth(head, scalar), plain(head, scalar)
    return {
        name: (error(name, value, true[name]), FACTORS[name] * error(name, simple[name], true[name]) + SLACK)
        for name, value in ours.items()
    }
