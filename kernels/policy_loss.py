"""The loss of every objective from log-probs and its gradient, in one Triton kernel (objectives.py has it in PyTorch).

    loss = w (I s(r, logp, A) + beta KL),   g = dloss/dlogp

with r the ratio, A the advantage, w the weight that carries the aggregation, and I the importance weight against the
sampler. The formulas of s and KL stand in objectives.py. What couples the tokens of a sequence (its mean log-ratio, its
importance weight, VESPO's phi) is computed by a handful of O(M) sums in PyTorch and comes in per token.

`loss_rows` computes some tokens of a block, and is what logits.py calls too. `_policy_loss_fwd_kernel` gives a
block of tokens to each program.

Shapes: M kept tokens, one row each. Every value per token is fp32 [M].
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch, objectives
from fastgrpo.kernels.launch import ROWS_VARY
from fastgrpo.kernels.objectives import PolicyRows, kl_estimate, surrogate

# What the rows of the kernel's [6, M] output hold.
LOSS, GRAD = 0, 1
BLOCK = 256


@triton.jit
def loss_rows(logp, rows, n_rows, old_ptr, log_ratio_ptr, ref_ptr, advantage_ptr, weight_ptr, importance_ptr, phi_ptr,
                out_ptr, low, high, delta, beta, tau_pos, tau_neg, SURROGATE: tl.constexpr, KIND: tl.constexpr,
                CORRECT_KL: tl.constexpr):  # fmt: skip
    """Store loss and metrics of some tokens into out [6, M], and return their g.

    Where log_ratio is given, the part of g that flows through it belongs to the whole sequence: it is stored in out and
    left out of what is returned.

    Args:
        logp: Log-probs of the tokens.
        rows: Numbers of the tokens.
        n_rows: M.
        old_ptr: [M] log-probs under the policy that drew the tokens, or None for a ratio of 1.
        log_ratio_ptr: [M] log-ratios that take the place of logp - old, or None.
        ref_ptr: [M] log-probs under the reference, or None for no KL.
        advantage_ptr: [M] A.
        weight_ptr: [M] w.
        importance_ptr: [M] I, or None for 1.
        phi_ptr: [M] VESPO's weights, or None.
        out_ptr: [6, M] output.
        low: Lower bound of the clipped ratio.
        high: Upper bound of the clipped ratio.
        delta: Upper bound of the unclipped ratio, or None.
        beta: Factor of the KL.
        tau_pos: SAPO's temperature where A > 0.
        tau_neg: SAPO's temperature elsewhere.
        SURROGATE: Name of the surrogate.
        KIND: Name of the KL estimator.
        CORRECT_KL: Whether the KL is multiplied by the ratio.
    """
    ok = rows < n_rows
    log_ratio = tl.zeros_like(logp)
    if log_ratio_ptr is not None:
        log_ratio = tl.load(log_ratio_ptr + rows, mask=ok, other=0.0)
    elif old_ptr is not None:
        log_ratio = logp - tl.load(old_ptr + rows, mask=ok, other=0.0).to(tl.float32)
    ratio = tl.exp(log_ratio)  # r = pi / pi_old
    advantage = tl.load(advantage_ptr + rows, mask=ok, other=0.0)
    weight = tl.load(weight_ptr + rows, mask=ok, other=0.0)
    phi = tl.zeros_like(logp)
    if phi_ptr is not None:
        phi = tl.load(phi_ptr + rows, mask=ok, other=0.0)
    value, by_ratio, by_logp = surrogate(SURROGATE, logp, ratio, advantage, phi, low, high, delta, tau_pos, tau_neg)
    scale = weight
    if importance_ptr is not None:
        scale *= tl.load(importance_ptr + rows, mask=ok, other=0.0)
    policy = scale * value
    grad, grad_ratio = scale * by_logp, scale * by_ratio
    kl = tl.zeros_like(logp)
    if ref_ptr is not None:
        kl, dkl = kl_estimate(KIND, tl.load(ref_ptr + rows, mask=ok, other=0.0).to(tl.float32) - logp)
        if CORRECT_KL:  # r KL, with gradient through both (arXiv 2512.02556)
            kl *= ratio
            dkl *= ratio
            grad_ratio += beta * weight * kl
        grad += beta * weight * dkl
    if log_ratio_ptr is None:
        grad += grad_ratio
    tl.store(out_ptr + rows, policy + beta * weight * kl, mask=ok)
    tl.store(out_ptr + n_rows + rows, grad, mask=ok)
    tl.store(out_ptr + 2 * n_rows + rows, grad_ratio, mask=ok)
    tl.store(out_ptr + 3 * n_rows + rows, policy, mask=ok)
    tl.store(out_ptr + 4 * n_rows + rows, kl, mask=ok)
    tl.store(out_ptr + 5 * n_rows + rows, ratio, mask=ok)
    return grad


@triton.jit(**ROWS_VARY)
def _policy_loss_fwd_kernel(logp_ptr, old_ptr, log_ratio_ptr, ref_ptr, advantage_ptr, weight_ptr, importance_ptr,
                            phi_ptr, out_ptr, low, high, delta, beta, tau_pos, tau_neg, n_rows,
                            SURROGATE: tl.constexpr, KIND: tl.constexpr, CORRECT_KL: tl.constexpr,
                            BLOCK: tl.constexpr):  # fmt: skip
    """Compute the loss of one block of tokens."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    logp = tl.load(logp_ptr + rows, mask=rows < n_rows, other=0.0)
    loss_rows(logp, rows, n_rows, old_ptr, log_ratio_ptr, ref_ptr, advantage_ptr, weight_ptr, importance_ptr, phi_ptr,
                out_ptr, low, high, delta, beta, tau_pos, tau_neg, SURROGATE, KIND, CORRECT_KL)  # fmt: skip


@launch.operator("fastgrpo::policy_loss_rows")
def policy_loss_rows(logps: torch.Tensor, old: torch.Tensor | None, log_ratio: torch.Tensor | None,
                     ref: torch.Tensor | None, advantages: torch.Tensor, weights: torch.Tensor,
                     importance: torch.Tensor | None, phi: torch.Tensor | None, surrogate: str, kl: str,
                     correct_kl: bool, low: float, high: float, delta: float | None, beta: float, tau_pos: float,
                     tau_neg: float) -> torch.Tensor:  # fmt: skip
    """Run the kernel over all kept tokens.

    Args:
        logps: [M] log-probs under the policy.
        old: [M] log-probs under the policy that drew the tokens, or None for a ratio of 1.
        log_ratio: [M] log-ratios that take the place of logps - old, or None.
        ref: [M] log-probs under the reference, or None for no KL.
        advantages: [M].
        weights: [M], which carry the mask and the whole aggregation.
        importance: [M] importance weights against the sampler, or None for 1.
        phi: [M] VESPO's weights, or None.
        surrogate: Name of the surrogate: clip, cispo, sapo or vespo.
        kl: Name of the KL estimator: k1, k2, k3 or abs.
        correct_kl: Whether the KL is multiplied by the ratio.
        low: Lower bound of the clipped ratio.
        high: Upper bound of the clipped ratio.
        delta: Upper bound of the unclipped ratio, or None.
        beta: Factor of the KL.
        tau_pos: SAPO's temperature for tokens with a positive advantage.
        tau_neg: SAPO's temperature for the other tokens.

    Returns:
        [6, M] fp32: the loss, g (without what flows through a given log_ratio), the part of the gradient that flows
        through the log-ratio, the loss without its KL, the KL, and the ratio.
    """
    n = len(logps)
    out = logps.new_empty(6, n, dtype=torch.float32)
    if n:
        rows = (logps, old, log_ratio, ref, advantages, weights, importance, phi)
        assert all(x is None or x.shape == (n,) for x in rows), [None if x is None else x.shape for x in rows]
        rows = (None if x is None else x.float().contiguous() for x in rows)
        _policy_loss_fwd_kernel[(triton.cdiv(n, BLOCK),)](
            *rows, out, low, high, delta, beta, tau_pos, tau_neg, n,
            SURROGATE=surrogate, KIND=kl, CORRECT_KL=correct_kl, BLOCK=BLOCK, **launch.options(),
        )  # fmt: skip
    return out


@policy_loss_rows.register_fake
def _(logps, *_):
    return logps.new_empty(6, len(logps), dtype=torch.float32)


def policy_loss_fwd(
    logps: torch.Tensor, rows: PolicyRows, objective: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of each token and its gradient, as objectives.policy_loss_fwd does.

    Args:
        logps: [M] fp32 log-probs under the policy.
        rows: The kept tokens.
        objective: An Objective.

    Returns:
        loss [M], its weight applied; g [M] = d(sum loss)/dlogp; and the metrics [M] of objectives.policy_loss_fwd.
    """
    return objectives.policy_loss_fwd(logps, rows, objective, policy_loss_rows)
