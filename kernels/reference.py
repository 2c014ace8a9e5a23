"""Every operation in plain PyTorch with full logits: the specification, and the oracle of the tests.

Shapes: N rows (tokens), V vocabulary, D hidden, S sequences. No cleverness here: whatever these functions and autograd
return is right by definition. Results are fp32, or fp64 where the inputs are fp64 (for gradcheck).
"""

import torch


def _compute_dtype(tensor):
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def linear_logprob(hidden, weight, targets, *, bias=None, temperature=1.0, return_entropy=False):
    """Log-probability of `targets` under softmax((hidden @ weight.T + bias) / temperature).

    Args:
        hidden: [N, D] floating point. weight: [V, D]. targets: [N] int64 in [0, V). bias: [V] or None.
        temperature: float, or tensor [N].
        return_entropy: also return the entropy of each row, in nats.

    Returns:
        logps [N], or (logps [N], entropy [N]).
    """
    dtype = _compute_dtype(hidden)
    logits = hidden.to(dtype) @ weight.to(dtype).T  # z = (h W^T + b) / T
    if bias is not None:
        logits = logits + bias.to(dtype)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(dtype)[:, None]
    all_logps = torch.log_softmax(logits / temperature, dim=-1)
    logps = all_logps.gather(-1, targets[:, None])[:, 0]
    if not return_entropy:
        return logps
    return logps, -(all_logps.exp() * all_logps).sum(-1)  # H = -sum_v p_v log p_v


def policy_loss(logps, old_logps, ref_logps, advantages, weights, objective, lengths=None):
    """The GRPO loss from log-probabilities: sum_n w_n (-min(r_n A_n, clip(r_n) A_n) + beta KL_n).

    Sources: the clipped surrogate, PPO (arXiv 1707.06347 eq. 7) as used by GRPO (arXiv 2402.03300 eq. 3); the upper
    bound `delta` on the ratio, INTELLECT-2 (arXiv 2505.07291 eq. 2); sequence-level ratios, GSPO (arXiv 2507.18071
    eq. 7); the KL estimators k1, k2, k3, http://joschu.net/blog/kl-approx.html.

    Args:
        logps, advantages, weights: [N]; the weights carry the mask and the whole aggregation.
        old_logps: [N], or None for the first update of a rollout, where the ratio is exactly 1.
        ref_logps: [N], or None where objective.beta is 0.
        objective: anything with `importance_sampling_level`, `epsilon`, `epsilon_high`, `delta`, `beta`, `kl`.
        lengths: [S] rows of each sequence, in order; needed by sequence-level ratios.

    Returns:
        (loss scalar, metrics): the mean over the rows of `kl`, `ratio/mean`, `ratio/max`, `clip_ratio/low_mean`,
        `clip_ratio/high_mean`, and `policy_loss`, the part of the loss without the KL.
    """
    old_logps = logps.detach() if old_logps is None else old_logps
    log_ratio = logps - old_logps
    if objective.importance_sampling_level == "sequence":
        pieces = log_ratio.split(lengths.tolist())
        log_ratio = torch.cat([piece.mean().expand(len(piece)) for piece in pieces if len(piece)] or [log_ratio])
    ratio = log_ratio.exp()
    low, high = 1 - objective.epsilon, 1 + objective.epsilon_high
    bounded = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
    surrogate = -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
    kl = torch.zeros_like(logps)
    if objective.beta != 0:
        d = ref_logps - logps
        kl = {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: d.exp() - d - 1}[objective.kl]()
    loss = (weights * (surrogate + objective.beta * kl)).sum()
    metrics = {
        "policy_loss": (weights * surrogate).sum(),
        "kl": kl.mean(),
        "ratio/mean": ratio.mean(),
        "ratio/max": ratio.max(),
        "clip_ratio/low_mean": ((ratio < low) & (advantages < 0)).float().mean(),
        "clip_ratio/high_mean": ((ratio > high) & (advantages > 0)).float().mean(),
    }
    return loss, {name: value.detach() for name, value in metrics.items()}


def linear_grpo_loss(hidden, weight, targets, advantages, weights, objective, *, old_logps=None, ref_logps=None,
                     lengths=None, bias=None, temperature=1.0):  # fmt: skip
    """The two functions above, one after the other: hidden [N, D] x weight [V, D] -> (loss, logps [N], metrics)."""
    logps = linear_logprob(hidden, weight, targets, bias=bias, temperature=temperature)
    loss, metrics = policy_loss(logps, old_logps, ref_logps, advantages, weights, objective, lengths)
    return loss, logps.detach(), metrics
