"""Heads to try the Triton kernels on, and the tolerance that they are held to.

The truth is that of oracle.py, in fp64. Plain is PyTorch in the inputs' dtype with fp32 logits: fp32 accumulation, dz
rounded to the inputs' dtype for its two products, as autograd rounds it. A kernel may err 1.1 times as much as plain
in log-probs and dH and 1.5 times in dW, plus 1e-5; errors of log-probs are absolute (nats, or relative past one nat),
those of gradients relative in norm.
"""

from dataclasses import dataclass, replace

import oracle
import torch

from fastgrpo import Objective
from fastgrpo.kernels import reference
from fastgrpo.kernels.policy_rows import PolicyRows

SLACK = 1e-5
FACTORS = {"logps": 1.1, "entropy": 1.1, "hidden": 1.1, "weight": 1.5, "bias": 1.5, "logits": 1.1, "loss": 1.1}


@dataclass
class Head:
    """A head and what the loss reads of its rows; every tensor on one device, hidden and weight in one dtype."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor
    lengths: torch.Tensor
    bias: torch.Tensor | None = None
    temperature: float | torch.Tensor = 1.0
    softcap: float | None = None
    grad_logps: torch.Tensor | None = None
    grad_entropy: torch.Tensor | None = None

    def rows(self, objective, **fields):
        coupled = objective.couples_tokens(fields.get("sampler_logps") is not None)
        return PolicyRows(
            index=None, targets=self.targets, temperature=self.temperature, advantages=self.advantages,
            weights=self.weights, old_logps=self.old_logps, ref_logps=self.ref_logps if objective.beta else None,
            lengths=self.lengths if coupled else None, **fields,
        )  # fmt: skip

    def leaves(self):
        """Fresh leaves of hidden, weight and bias that require grad."""
        tensors = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {k: v.detach().clone().requires_grad_() for k, v in tensors.items() if v is not None}


def random_head(n, d, v, dtype=torch.float32, *, bias=False, temperature=1.0, softcap=None, scale=1.0, seed=0,
                device="cpu"):  # fmt: skip
    """Logits of standard deviation `scale`; half of the targets likely ones. temperature: a float or "row"."""
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, device=device)

    hidden, weight = randn(n, d).to(dtype), (randn(v, d) * scale / d**0.5).to(dtype)
    targets = torch.randint(v, (n,), generator=g, device=device)
    if n * v < 2**26:
        targets[::2] = (hidden.float() @ weight.float().T)[::2].argmax(-1)
    if temperature == "row":
        temperature = torch.rand(n, generator=g, device=device) + 0.5
    head = Head(hidden, weight, targets, randn(n), torch.rand(n, generator=g, device=device) / n, None, None,
                _ragged(n).to(device), randn(v).to(dtype) if bias else None, temperature, softcap, randn(n),
                randn(n))  # fmt: skip
    if n * v < 2**26:
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


def truth(head, scalar):
    """oracle.truth_of the head in fp64, for a loss `scalar(logps, entropy)`."""
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in head.leaves().items()}
    return oracle.truth_of(leaves, head.targets, scalar, temperature=head.temperature, softcap=head.softcap)


def plain(head, scalar):
    """The same in the inputs' dtype with fp32 logits; see the module docstring."""
    dtype = head.hidden.dtype
    hidden, weight = head.hidden.float(), head.weight.float()
    x = (hidden @ weight.T).requires_grad_()
    y = x if head.bias is None else x + head.bias.float()
    y = y if head.softcap is None else head.softcap * torch.tanh(y / head.softcap)
    logps, entropy = reference.logits_logprob(y, head.targets, temperature=head.temperature, return_entropy=True)
    loss = scalar(logps, entropy)
    (dz,) = torch.autograd.grad(loss, x)
    dz = dz.to(dtype).float()
    grads = {"hidden": (dz @ weight).to(dtype), "weight": (dz.T @ hidden).to(dtype)}
    if head.bias is not None:
        grads["bias"] = dz.sum(0).to(dtype)
    return {"logps": logps, "entropy": entropy, "loss": loss, **grads}


def error(name, value, true):
    """Largest error of log-probs, entropy and loss, in nats or relative past one nat; relative in norm of gradients."""
    value, true = value.detach().double(), true.detach().double()
    if name in ("logps", "entropy", "loss"):
        return ((value - true).abs() / true.abs().clamp(min=1)).max().item() if true.numel() else 0.0
    return oracle.error(value, true)


def check(ours, head, scalar):
    """ours: a dict with some of truth's entries."""
    true, simple = truth(head, scalar), plain(head, scalar)
    for name, value in ours.items():
        bound = FACTORS[name] * error(name, simple[name], true[name]) + SLACK
        assert error(name, value, true[name]) <= bound, (name, error(name, value, true[name]), bound)


def policy_scalar(head, objective, **fields):
    """The loss of `objective` as a function of logps and entropy, for truth and plain."""
    return oracle.policy_scalar(head.rows(objective, **fields), objective)


__all__ = ["Objective", "check", "error", "plain", "policy_scalar", "random_head", "truth"]
