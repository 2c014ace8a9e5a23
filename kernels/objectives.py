"""The loss of every objective from log-probs, with its gradient in closed form: reference.policy_loss by hand.

Shapes: M kept tokens, S sequences. Per token, with r the ratio, A the advantage, w the weight and I the importance
weight against the sampler,

    loss = w (I s(r, logp, A) + beta KL),    g = w I ds/dlogp + beta w dKL/dlogp + mean over the sequence of (...)

A surrogate s is one small function in SURROGATES. It returns its value, its slope through log r (which a
sequence-level ratio spreads over the tokens of the sequence), and its slope through logp itself. The same formulas
stand as Triton in policy_loss.py.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: fp64 for fp64 inputs (for gradcheck), and fp32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def no_autocast(tensor: torch.Tensor) -> torch.autocast:
    """Keep fp32 products in fp32, even inside the caller's torch.autocast."""
    return torch.autocast(tensor.device.type, enabled=False)


def needed(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    """Tell which tensors want a gradient now.

    Autograd functions are told this from outside: their ctx.needs_input_grad stays True under no_grad.
    """
    grad = torch.is_grad_enabled()
    return tuple(grad and tensor is not None and tensor.requires_grad for tensor in tensors)


def first_order(name: str) -> Callable[[Callable], Callable]:
    """Make a decorator for the backward of an autograd function, which then refuses create_graph=True.

    It refuses in the first backward, although only a second one would be wrong: to refuse in the second, the gradient
    would have to keep all inputs in memory. Inside of a graph of torch.compile nothing can raise an error.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx, *grad_outputs):
            # Gradients are recorded in a backward under create_graph=True alone.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(f"{name} has no second derivatives: it cannot take part in a backward under "
                                   "create_graph=True")  # fmt: skip
            with torch.no_grad():
                return backward(ctx, *grad_outputs)

        return once

    return decorate


class PolicyRows(NamedTuple):
    """What the loss needs to know of the M kept tokens. Nothing in it carries gradient.

    Attributes:
        index: [M] int64, increasing: the places of the kept tokens among the N of the batch. None where all are kept.
        targets: [M] int64 token ids.
        temperature: A float, or [M].
        advantages: [M] fp32 (fp64 for fp64 inputs, as all floats here).
        weights: [M] fp32, which carry the mask and the whole aggregation.
        old_logps: [M] log-probs under the policy that drew the tokens, or None where the ratio is 1.
        ref_logps: [M] log-probs under the reference, or None where there is no KL.
        lengths: [S] int64 kept tokens of each sequence, or None where the objective never looks at sequences.
        sampler_logps: [M] log-probs that the sampler reported, NaN where it reported none, or None.
        entropy_weights: [M] weights of the entropy bonus, its coefficient included, or None.
        active: [M] bool, where only the device knows which tokens carry gradient; None where all of them do. Tokens
            without gradient have finite stand-ins in every field, weight 0, and hidden states that must not be read.
        host_lengths: `lengths` as a tuple, where the host knows them without waiting for the device.
    """

    index: torch.Tensor | None
    targets: torch.Tensor
    temperature: float | torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor | None
    lengths: torch.Tensor | None
    sampler_logps: torch.Tensor | None = None
    entropy_weights: torch.Tensor | None = None
    active: torch.Tensor | None = None
    host_lengths: tuple[int, ...] | None = None

    def cut(self, part: slice, sequences: slice) -> "PolicyRows":
        """Take the tokens of one chunk."""
        fields = {name: cut(value, part) for name, value in self._asdict().items()}
        return PolicyRows(**{**fields, "lengths": cut(self.lengths, sequences)})


def cut(value: Any, part: slice) -> Any:
    """Slice a value per token; a float or None stands for all tokens and passes.

    Args:
        value: [M] tensor, float or None.
        part: The chunk's slice of the kept tokens.

    Returns:
        `value[part]`, or `value` itself where it is no tensor.
    """
    return value[part] if isinstance(value, torch.Tensor) else value


def sequence_slices(lengths: Sequence[int], size: int) -> list[tuple[slice, slice]]:
    """Cut tokens into chunks that end where sequences end."""
    parts, row, first, end = [], 0, 0, 0
    for i, length in enumerate(lengths):
        if end + length - row > size:
            parts.append((slice(row, end), slice(first, i)))
            row, first = end, i
        end += length
    return [*parts, (slice(row, end), slice(first, len(lengths)))]


def policy_parts(
    rows: PolicyRows, objective: Any, slices: list[slice], size: int, policy_loss_fwd: Callable,
    forward_only: Callable[[], torch.Tensor],
) -> tuple[list[tuple[slice, slice]], tuple | None]:  # fmt: skip
    """Choose the chunks of a fused loss, and compute the policy loss first where one chunk alone cannot know it.

    A factor of the whole sequence (`rows.lengths` is given) needs the log-probs of all its tokens. Chunks then end
    where sequences end. A sequence longer than a chunk, or lengths that only the device knows, cost a forward-only pass
    over all tokens ahead of the chunks.

    Args:
        rows: The kept tokens.
        objective: An Objective.
        slices: The chunks of an objective that never looks at sequences.
        size: Most tokens of a chunk.
        policy_loss_fwd: objectives.policy_loss_fwd or policy_loss.policy_loss_fwd.
        forward_only: Computes the log-probs [M] of all kept tokens.
    """
    parts = [(part, slice(None)) for part in slices]
    if rows.lengths is None or len(parts) == 1:
        return parts, None
    lengths = rows.host_lengths
    if lengths is None and rows.active is None and not torch.compiler.is_compiling():
        lengths = rows.lengths.tolist()  # the host has waited for the rows already
    if lengths is not None and max(lengths) <= size:
        return sequence_slices(lengths, size), None
    return parts, policy_loss_fwd(forward_only(), rows, objective)


def sequence_sum(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Give each token the sum over its sequence. segment_reduce sums in a fixed order.

    Args:
        values: [M] floats.
        lengths: [S] int64 tokens of each sequence.

    Returns:
        [M].
    """
    # unsafe=True: the safe form looks at the lengths, which makes the host wait for the device
    total = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
    return total.repeat_interleave(lengths, output_size=len(values))


def sequence_mean(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Give each token the mean over its sequence.

    Args:
        values: [M] floats.
        lengths: [S] int64 tokens of each sequence.

    Returns:
        [M].
    """
    mean = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True) / lengths.clamp(min=1)
    return mean.repeat_interleave(lengths, output_size=len(values))


LOG_RATIO_MAX = 20.0  # vespo holds log-ratios to [-20, 20] and sequence weights to [1e-8, e^20], as TRL does
LOG_WEIGHT_MIN = math.log(1e-8)


class Tokens(NamedTuple):
    """What a surrogate reads.

    Attributes:
        logps: [M] log-probs under the policy.
        log_ratio: [M] log-ratio of each token.
        ratio: [M] ratio at the objective's level, of the token or of its sequence.
        advantages: [M].
        importance: [M] importance weights against the sampler, or None.
        lengths: [S] int64 tokens of each sequence, or None.
    """

    logps: torch.Tensor
    log_ratio: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor
    importance: torch.Tensor | None
    lengths: torch.Tensor | None


class Surrogate(NamedTuple):
    """What a surrogate returns.

    Attributes:
        value: [M], s of each token.
        by_log_ratio: ds/dlog r, [M] or 0.
        by_logp: ds/dlogp apart from the ratio, [M] or 0.
    """

    value: torch.Tensor
    by_log_ratio: torch.Tensor | float
    by_logp: torch.Tensor | float


def _clip(tokens, objective):
    """-min(r A, clip(r) A): PPO (arXiv 1707.06347 eq. 7), with the first r held under delta (arXiv 2505.07291)."""
    ratio, advantages = tokens.ratio, tokens.advantages
    low, high = objective.ratio_bounds
    bounded = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
    unclipped, clipped = bounded * advantages, ratio.clamp(low, high) * advantages
    # The gradient flows through the smaller branch, and there only where its clamp does not hold the ratio.
    flows = torch.where(unclipped <= clipped, bounded == ratio, (low <= ratio) & (ratio <= high))
    return Surrogate(-torch.min(unclipped, clipped), torch.where(flows, -advantages * ratio, 0.0), 0.0)


def _cispo(tokens, objective):
    """-sg(min(r, epsilon_high)) A logp: every token keeps its gradient (arXiv 2506.13585; cap of 2510.13786)."""
    slope = -tokens.ratio.clamp(max=objective.ratio_bounds[1]) * tokens.advantages
    return Surrogate(slope * tokens.logps, 0.0, slope)


def _sapo(tokens, objective):
    """-4/tau sigmoid(tau (r - 1)) A: a soft gate instead of the clip (arXiv 2511.20347)."""
    ratio, advantages = tokens.ratio, tokens.advantages
    tau = _choose(advantages > 0, objective.sapo_temperature_pos, objective.sapo_temperature_neg, advantages)
    gate = torch.sigmoid(tau * (ratio - 1))
    # d gate / d log r = tau gate (1 - gate) r
    return Surrogate(-4 / tau * gate * advantages, -4 * gate * (1 - gate) * ratio * advantages, 0.0)


def _vespo(tokens, objective):
    """-sg(phi(W)) A logp (arXiv 2602.10693)."""
    slope = -vespo_phi(tokens, objective) * tokens.advantages
    return Surrogate(slope * tokens.logps, 0.0, slope)


def vespo_phi(tokens: Tokens, objective: Any) -> torch.Tensor:
    """Compute VESPO's weight (arXiv 2602.10693). It reads neither log-probs nor ratio.

        log phi = lambda + k log W - lambda W,   W the product of the ratios of the sequence

    Returns:
        phi(W) [M], the same for all tokens of a sequence whose advantages have one sign.
    """
    log_w = sequence_sum(tokens.log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX), tokens.lengths)
    if tokens.importance is not None:  # W is the ratio to the sampler: pi/old times old/sampler
        log_w = log_w + sequence_sum(tokens.importance.log().clamp(LOG_WEIGHT_MIN, LOG_RATIO_MAX), tokens.lengths)
    log_w = log_w.clamp(LOG_WEIGHT_MIN, LOG_RATIO_MAX)
    gained = tokens.advantages >= 0
    k = _choose(gained, objective.vespo_k_pos, objective.vespo_k_neg, log_w)
    rate = _choose(gained, objective.vespo_lambda_pos, objective.vespo_lambda_neg, log_w)
    return (rate + k * log_w - rate * log_w.exp()).exp()


def _choose(condition, yes, no, like):
    """Choose one of two floats per token, in the dtype of `like`. torch.where would round both to fp32."""
    return torch.full_like(like, no).masked_fill_(condition, yes)


SURROGATES = {"clip": _clip, "cispo": _cispo, "sapo": _sapo, "vespo": _vespo}

# Estimators of KL(policy || reference) from d = ref - logp: (value, derivative by logp).
# Source: http://joschu.net/blog/kl-approx.html
KL_ESTIMATORS = {
    "k1": lambda d: (-d, torch.ones_like(d)),
    "k2": lambda d: (d.square() / 2, -d),
    "k3": lambda d: (torch.expm1(d) - d, -torch.expm1(d)),  # e^d - d - 1
    "abs": lambda d: (d.abs(), -d.sign()),
}


def policy_loss_fwd(
    logps: torch.Tensor, rows: PolicyRows, objective: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of each token and its gradient in closed form.

    Args:
        logps: [M] log-probs under the policy.
        rows: The kept tokens.
        objective: An Objective.

    Returns:
        loss [M], its weight applied; g [M] = d(sum loss)/dlogp; and per-token metrics [M] by name: `policy_loss`
        (weighted), `kl`, `ratio`, `clipped_low`, `clipped_high`, and with sampler_logps `importance` and `sampler_gap`.
    """
    advantages, weights = rows.advantages, rows.weights
    per_sequence = objective.importance_sampling_level == "sequence"
    log_ratio = torch.zeros_like(logps) if rows.old_logps is None else logps - rows.old_logps
    ratio = (sequence_mean(log_ratio, rows.lengths) if per_sequence else log_ratio).exp()
    importance, metrics = importance_weights(logps, rows, objective)
    surrogate = SURROGATES[objective.surrogate](
        Tokens(logps, log_ratio, ratio, advantages, importance, rows.lengths), objective
    )
    # w I; vespo has the importance weight inside of phi
    scale = weights if importance is None or objective.surrogate == "vespo" else weights * importance
    policy = scale * surrogate.value  # w I s
    g, g_ratio = scale * surrogate.by_logp, scale * surrogate.by_log_ratio
    kl = torch.zeros_like(logps)
    if objective.beta != 0 and not objective.full_kl:  # the full one is not a function of the log-probs: full_kl.py
        kl, dkl = KL_ESTIMATORS[objective.kl](rows.ref_logps - logps)
        if objective.use_bias_correction_kl:  # r KL, with gradient through both (arXiv 2512.02556)
            kl, dkl = kl * ratio, dkl * ratio
            g_ratio = g_ratio + objective.beta * weights * kl
        g = g + objective.beta * weights * dkl
    # Every token of the sequence moves the common ratio by 1/len: d(mean log-ratio)/d(logp_t) = 1/len.
    g = g + (sequence_mean(g_ratio, rows.lengths) if per_sequence else g_ratio)
    low, high = objective.ratio_bounds
    metrics |= {
        "policy_loss": policy,
        "kl": kl,
        "ratio": ratio,
        "clipped_low": (ratio < low) & (advantages < 0),
        "clipped_high": (ratio > high) & (advantages > 0),
    }
    return policy + objective.beta * weights * kl, g, metrics  # w (I s + beta KL)


def importance_weights(
    logps: torch.Tensor, rows: PolicyRows, objective: Any
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """Compute I = exp(old - sampler) of each token or of its sequence, truncated to its bounds or masked outside them.

    No gradient flows through it. A token without a sampler's log-prob (NaN) counts as log-ratio 0.

    Args:
        logps: [M] log-probs under the policy, which stand for the old ones where these are None.
        rows: The kept tokens.
        objective: An Objective.

    Returns:
        I [M], and the metrics `importance` and `sampler_gap` [M]. Without sampler_logps None and no metrics.
    """
    if rows.sampler_logps is None:
        return None, {}
    gap = (logps if rows.old_logps is None else rows.old_logps) - rows.sampler_logps
    log_importance = torch.where(gap.isnan(), 0.0, gap)
    level, action = objective.importance_sampling_mode.split("_")
    if level == "sequence":
        log_importance = sequence_sum(log_importance, rows.lengths)
    importance, (low, high) = log_importance.exp(), objective.importance_bounds
    if action == "truncate":
        importance = importance.clamp(low, high)
    else:
        importance = torch.where((importance < low) | (importance > high), 0.0, importance)
    return importance, {"importance": importance, "sampler_gap": gap.abs()}


class PolicyLoss(torch.autograd.Function):
    """Returns the loss of log-probs [M], a scalar, and a dict of [M] metrics.

    `fwd` is the `policy_loss_fwd` of this module, or the one of policy_loss.py, which runs it as a Triton kernel.
    """

    @staticmethod
    def forward(ctx, logps, rows, objective, fwd):
        ctx.set_materialize_grads(False)
        logps = logps.to(compute_dtype(logps))
        loss, g, metrics = fwd(logps, rows, objective)
        ctx.save_for_backward(g)
        return loss.sum(dtype=torch.float64).to(loss.dtype), {"logps": logps.detach(), **metrics}

    @staticmethod
    @first_order("grpo_loss")
    def backward(ctx, grad_loss, _):
        (g,) = ctx.saved_tensors
        return (None if grad_loss is None else g * grad_loss), None, None, None
