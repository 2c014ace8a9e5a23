"""The loss of every objective from log-probs, with its gradient in closed form; see reference.policy_loss.

Shapes: M kept tokens, S sequences. Per token, with r the ratio, A the advantage, w the weight and I the importance
weight against the sampler,

    loss = w (I s(r, logp, A) + beta KL),    g = w I (ds/dlogp + ds/dlog r) + beta w dKL/dlogp

Each surrogate s, each KL estimate and their sum `token_loss` is one function for both Triton and PyTorch. logits.py
runs it in Triton kernels. With a sequence-level ratio, the gradient by log r is averaged over the sequence.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

if find_spec("triton") is not None:
    import triton.language as tl
    from triton import jit
else:

    def jit(function):  # noqa: D103
        return function


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: fp64 for fp64 inputs (for gradcheck), else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def constant(function: Callable) -> Callable:
    """Mark a function as `torch.compiler.assume_constant_result` does, which first imports the compiler: a second."""
    function._dynamo_marked_constant = True
    return function


def no_autocast(tensor: torch.Tensor) -> torch.autocast:
    """Disable torch.autocast, so that fp32 products stay fp32."""
    return torch.autocast(tensor.device.type, enabled=False)


def needed(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    """Return which tensors need a gradient now.

    Callers pass this to autograd functions, because ctx.needs_input_grad stays True under no_grad.
    """
    grad = torch.is_grad_enabled()
    return tuple(grad and tensor is not None and tensor.requires_grad for tensor in tensors)


def first_order(name: str) -> Callable[[Callable], Callable]:
    """Return a decorator for the backward of an autograd function, which raises under create_graph=True.

    It raises in the first backward, although only a second one would be wrong: to raise in the second, the gradient
    would have to keep all inputs in memory. A graph of torch.compile cannot raise.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx, *grad_outputs):
            # In a backward, grad mode is on only under create_graph=True.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(f"{name} has no second derivatives: it cannot take part in a backward under "
                                   "create_graph=True")  # fmt: skip
            with torch.no_grad():
                return backward(ctx, *grad_outputs)

        return once

    return decorate


class PolicyRows(NamedTuple):
    """The M kept tokens of a loss, without gradient. Floats are fp32, or fp64 for fp64 inputs."""

    index: torch.Tensor | None  # [M] int64, places in the batch of N tokens, active tokens first; None if all are kept
    targets: torch.Tensor  # [M] int64 token ids
    temperature: float | torch.Tensor  # a float, or [M]
    advantages: torch.Tensor  # [M]
    weights: torch.Tensor  # [M], with the mask and the whole aggregation
    old_logps: torch.Tensor | None  # [M], under the policy that drew the tokens; None if the ratio is 1
    ref_logps: torch.Tensor | None  # [M], under the reference; None without KL
    lengths: torch.Tensor | None  # [S] int64 kept tokens of each sequence; None for an objective per token
    sampler_logps: torch.Tensor | None = None  # [M], reported by the sampler, NaN where it reported none
    entropy_weights: torch.Tensor | None = None  # [M], of the entropy bonus, including its coefficient
    # [M] bool, True for tokens that carry gradient; None if all do. Inactive tokens hold finite dummies, weight 0, and
    # hidden states that must not be read.
    active: torch.Tensor | None = None
    host_lengths: tuple[int, ...] | None = None  # `lengths`, if known on the host without a sync

    def cut(self, part: slice, sequences: slice) -> "PolicyRows":
        """Return the tokens of one chunk."""
        fields = {name: cut(value, part) for name, value in self._asdict().items()}
        return PolicyRows(**{**fields, "lengths": cut(self.lengths, sequences)})


def cut(value: Any, part: slice) -> Any:
    """Return `value[part]` for a tensor [M]. A float or None, which applies to all tokens, is returned unchanged."""
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
    """Choose the chunks of a fused loss, and compute the policy loss first if chunks would split sequences.

    A sequence-level factor (`rows.lengths` is given) needs all log-probs of the sequence, so chunks then end where
    sequences end. If a sequence is longer than a chunk, or the lengths are only on the device, `forward_only` computes
    the log-probs [M] of all kept tokens before the chunks. `slices` are the chunks for an objective per token. Returns
    the chunks, and the results of `policy_loss_fwd` over all tokens, or None if it has not run.
    """
    parts = [(part, slice(None)) for part in slices]
    if rows.lengths is None or len(parts) == 1:
        return parts, None
    lengths = rows.host_lengths
    if lengths is None and rows.active is None and not torch.compiler.is_compiling():
        lengths = rows.lengths.tolist()  # waits for the device, where `rows` or `cu_seqlens` are
    if lengths is not None and max(lengths) <= size:
        return sequence_slices(lengths, size), None
    return parts, policy_loss_fwd(forward_only(), rows, objective)


def sequence_sum(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Give each token [M] the sum over its sequence of `lengths` [S] int64 tokens, in a fixed order and in fp64."""
    # Tokens are added one after the other, which in fp32 is off by 1e-5 after thousands, and `vespo_phi` amplifies it.
    # unsafe=True, because the safe form validates the lengths, which is a sync.
    total = torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True).to(values.dtype)
    return total.repeat_interleave(lengths, output_size=len(values))


def sequence_mean(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Give each token [M] the mean over its sequence of `lengths` [S] int64 tokens."""
    return sequence_sum(values, lengths) / lengths.repeat_interleave(lengths, output_size=len(values))


LOG_RATIO_MAX = 20.0  # vespo clamps log-ratios to [-20, 20] and sequence weights to [1e-8, e^20], as TRL does
LOG_WEIGHT_MIN = math.log(1e-8)


class Tokens(NamedTuple):
    """Inputs of `vespo_phi`: [M] values, importance weights or None, and lengths [S] int64."""

    log_ratio: torch.Tensor
    advantages: torch.Tensor
    importance: torch.Tensor | None
    lengths: torch.Tensor


# The formulas of a token, for both Triton and PyTorch: `_in_torch` has the same functions with `Torch` as `tl`. A
# surrogate returns its value s, ds/dlog r (distributed over the tokens of a sequence for a sequence-level ratio), and
# ds/dlogp at a fixed ratio. A NaN ratio gives a NaN value: on a GPU, a plain minimum would drop it.


@jit
def clip(logp, ratio, advantage, phi, low, high, delta, tau_pos, tau_neg):
    """PPO (arXiv 1707.06347 eq. 7), -min(r A, clip(r) A), with the first r clamped to delta (arXiv 2505.07291)."""
    bounded = ratio
    if delta is not None:
        bounded = tl.minimum(ratio, delta, tl.PropagateNan.ALL)
    unclipped = bounded * advantage
    clipped = tl.minimum(tl.maximum(ratio, low), high) * advantage
    # The gradient flows through the smaller branch, and only if its clamp does not bind.
    inside = tl.where(unclipped <= clipped, bounded == ratio, (ratio >= low) & (ratio <= high))
    value = -tl.minimum(unclipped, clipped, tl.PropagateNan.ALL)
    return value, tl.where(inside, -advantage * ratio, 0.0), tl.zeros_like(ratio)


@jit
def cispo(logp, ratio, advantage, phi, low, high, delta, tau_pos, tau_neg):
    """-sg(min(r, high)) A logp: every token keeps its gradient (arXiv 2506.13585; cap of 2510.13786)."""
    slope = -tl.minimum(ratio, high, tl.PropagateNan.ALL) * advantage
    return slope * logp, tl.zeros_like(ratio), slope


@jit
def sapo(logp, ratio, advantage, phi, low, high, delta, tau_pos, tau_neg):
    """-4/tau sigmoid(tau (r - 1)) A: a soft gate instead of the clip (arXiv 2511.20347)."""
    tau = tl.where(advantage > 0, tl.zeros_like(advantage) + tau_pos, tau_neg)
    gate = tl.sigmoid(tau * (ratio - 1.0))
    # d gate / d log r = tau gate (1 - gate) r
    return -4.0 / tau * gate * advantage, -4.0 * gate * (1.0 - gate) * ratio * advantage, tl.zeros_like(ratio)


@jit
def vespo(logp, ratio, advantage, phi, low, high, delta, tau_pos, tau_neg):
    """-sg(phi(W)) A logp (arXiv 2602.10693); `vespo_phi` computes phi from the whole sequence."""
    slope = -phi * advantage
    return slope * logp, tl.zeros_like(ratio), slope


@jit
def surrogate(NAME, logp, ratio, advantage, phi, low, high, delta, tau_pos, tau_neg):
    """Return (s, ds/dlog r, ds/dlogp) of each token."""
    if NAME == "clip":
        result = clip(logp, ratio, advantage, phi, low, high, delta, tau_pos, tau_neg)
    elif NAME == "cispo":
        result = cispo(logp, ratio, advantage, phi, low, high, delta, tau_pos, tau_neg)
    elif NAME == "sapo":
        result = sapo(logp, ratio, advantage, phi, low, high, delta, tau_pos, tau_neg)
    else:
        tl.static_assert(NAME == "vespo")
        result = vespo(logp, ratio, advantage, phi, low, high, delta, tau_pos, tau_neg)
    return result


@jit
def kl_estimate(KIND, d):
    """Return the KL estimate from d = ref - logp and its derivative by logp (http://joschu.net/blog/kl-approx.html)."""
    if KIND == "k1":
        result = -d, tl.zeros_like(d) + 1.0
    elif KIND == "k2":
        result = 0.5 * d * d, -d
    elif KIND == "k3":
        result = k3(d), -expm1(d)
    else:
        tl.static_assert(KIND == "abs")
        result = tl.abs(d), tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, tl.zeros_like(d)))
    return result


@jit
def expm1(x):
    """Return e^x - 1 without cancellation at small x."""
    series = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * 0.008333334))))
    return tl.where(tl.abs(x) < 0.1, series, tl.exp(x) - 1.0)


@jit
def k3(d):
    """Return e^d - d - 1 without cancellation at small d."""
    series = d * d * (0.5 + d * (0.16666667 + d * (0.041666668 + d * (0.008333334 + d * 0.0013888889))))
    return tl.where(tl.abs(d) < 0.1, series, tl.exp(d) - d - 1.0)


@jit
def token_loss(logp, old, log_ratio, ref, advantage, weight, importance, phi, NAME, KIND, CORRECT_KL, low, high, delta,
               beta, tau_pos, tau_neg):  # fmt: skip
    """Compute the loss of tokens. `old`, `log_ratio`, `ref`, `importance` and `phi` may be None.

    A given `log_ratio` replaces logp - old. The results are the loss; g, without the gradient through a given
    log_ratio; that gradient, which the caller averages over the sequence; the weighted surrogate; the KL; the ratio.
    """
    moved = logp - logp  # 0, or NaN where logp is not finite: a ratio of 1 must not hide that
    if log_ratio is not None:
        moved = log_ratio
    elif old is not None:
        moved = logp - old
    ratio = tl.exp(moved)  # r = pi / pi_old
    value, by_ratio, by_logp = surrogate(NAME, logp, ratio, advantage, phi, low, high, delta, tau_pos, tau_neg)
    scale = weight
    if importance is not None:
        scale = weight * importance  # w I
    policy, grad, grad_ratio = scale * value, scale * by_logp, scale * by_ratio
    kl = tl.zeros_like(logp)
    if ref is not None:
        kl, dkl = kl_estimate(KIND, ref - logp)
        if CORRECT_KL:  # r KL, with gradient through both (arXiv 2512.02556)
            kl, dkl = kl * ratio, dkl * ratio
            grad_ratio = grad_ratio + beta * weight * kl
        grad = grad + beta * weight * dkl
    if log_ratio is None:
        grad = grad + grad_ratio
    return policy + beta * weight * kl, grad, grad_ratio, policy, kl, ratio  # w (I s + beta KL)


class Torch:
    """The functions of triton.language that the formulas use, in PyTorch."""

    abs, exp, sigmoid, where, zeros_like = torch.abs, torch.exp, torch.sigmoid, torch.where, torch.zeros_like
    PropagateNan = SimpleNamespace(ALL=None)

    @staticmethod
    def minimum(x, y, propagate_nan=None):  # PyTorch always propagates NaN
        return torch.minimum(x, y) if isinstance(y, torch.Tensor) else x.clamp(max=y)

    @staticmethod
    def maximum(x, y):
        return torch.maximum(x, y) if isinstance(y, torch.Tensor) else x.clamp(min=y)

    @staticmethod
    def static_assert(condition):
        assert condition


# The same formulas with PyTorch as `tl`, in a module, because torch.compile looks up globals by module name.
_in_torch = ModuleType(f"{__name__}_in_torch")
sys.modules[_in_torch.__name__] = _in_torch
_in_torch.__dict__.update(__builtins__=__builtins__, tl=Torch, expm1=torch.expm1, k3=lambda d: torch.expm1(d) - d)
for _formula in (clip, cispo, sapo, vespo, surrogate, kl_estimate, token_loss):
    _code = getattr(_formula, "fn", _formula).__code__
    setattr(_in_torch, _code.co_name, FunctionType(_code, vars(_in_torch)))


def _batch_tokens(mask, dtype, cu_seqlens, num_items, max_length):
    """w_n = 1 / tokens here (TRL's bnpo)."""
    return mask.sum().to(dtype).clamp(min=1)


def _step_tokens(mask, dtype, cu_seqlens, num_items, max_length):
    """w_n = 1 / tokens of the step (DAPO, arXiv 2503.14476 eq. 8)."""
    if num_items is None:
        return _batch_tokens(mask, dtype, cu_seqlens, num_items, max_length)
    if not isinstance(num_items, torch.Tensor):  # full is a kernel; as_tensor would copy from the host and wait
        return torch.full((), max(num_items, 1), dtype=dtype, device=mask.device)
    return num_items.reshape(()).to(mask.device, dtype, non_blocking=True).clamp(min=1)


def _sequence_mean(mask, dtype, cu_seqlens, num_items, max_length):
    """w_n = 1 / (S len_s), len_s the tokens of the sequence that count (GRPO, arXiv 2402.03300 eq. 3)."""
    lengths = cu_seqlens.diff()
    kept = torch.segment_reduce(mask.to(dtype), "sum", lengths=lengths, unsafe=True).clamp(min=1)
    return (len(lengths) * kept).repeat_interleave(lengths, output_size=len(mask))


def _sequence_sum(mask, dtype, cu_seqlens, num_items, max_length):
    """w_n = 1 / S (LUSPO, arXiv 2602.05261)."""
    return len(cu_seqlens) - 1


def _sequence_constant(mask, dtype, cu_seqlens, num_items, max_length):
    """w_n = 1 / (S max_length) (Dr. GRPO, arXiv 2503.20783 eq. 2)."""
    return (len(cu_seqlens) - 1) * max_length


# aggregation -> the divisor of the mask that gives w_n: a number, a scalar tensor or [N]. Names of those that read
# cu_seqlens begin with "sequence".
DIVISORS = {
    "batch_tokens": _batch_tokens,
    "step_tokens": _step_tokens,
    "sequence_mean": _sequence_mean,
    "sequence_sum": _sequence_sum,
    "sequence_constant": _sequence_constant,
}
# loss type -> (surrogate, aggregation)
LOSS_TYPES = {
    "grpo": ("clip", "sequence_mean"),
    "bnpo": ("clip", "batch_tokens"),
    "dapo": ("clip", "step_tokens"),
    "dr_grpo": ("clip", "sequence_constant"),
    "luspo": ("clip", "sequence_sum"),
    "cispo": ("cispo", "step_tokens"),
    "sapo": ("sapo", "sequence_mean"),
    "vespo": ("vespo", "step_tokens"),
}


def vespo_phi(tokens: Tokens, objective: Any) -> torch.Tensor:
    """Compute VESPO's weight (arXiv 2602.10693).

        log phi = lambda + k log W - lambda W,   W the product of the ratios of the sequence

    phi(W) [M] is the same for all tokens of a sequence whose advantages have one sign.
    """
    # in fp64, because an error of log W is multiplied by k - lambda W
    log_w = sequence_sum(tokens.log_ratio.double().clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX), tokens.lengths)
    if tokens.importance is not None:  # W is the ratio to the sampler: pi/old times old/sampler
        importance = tokens.importance.double().log().clamp(LOG_WEIGHT_MIN, LOG_RATIO_MAX)
        log_w = log_w + sequence_sum(importance, tokens.lengths)
    log_w = log_w.clamp(LOG_WEIGHT_MIN, LOG_RATIO_MAX)
    gained = tokens.advantages >= 0
    k = _choose(gained, objective.vespo_k_pos, objective.vespo_k_neg, log_w)
    rate = _choose(gained, objective.vespo_lambda_pos, objective.vespo_lambda_neg, log_w)
    return (rate + k * log_w - rate * log_w.exp()).exp().to(tokens.log_ratio.dtype)


def _choose(condition, yes, no, like):
    """Select one of two floats per token, in the dtype of `like`. torch.where would round both to fp32."""
    return torch.full_like(like, no).masked_fill_(condition, yes)


def kernel_knobs(objective: Any) -> tuple[str | bool | float | None, ...]:
    """Return an objective's knobs in the order of the arguments of `token_loss` and the kernels."""
    return (objective.surrogate, objective.kl, objective.use_bias_correction_kl, *objective.ratio_bounds,
            objective.delta, objective.beta, objective.sapo_temperature_pos,
            objective.sapo_temperature_neg)  # fmt: skip


def policy_metrics(out: Any, advantages: torch.Tensor, objective: Any) -> dict[str, torch.Tensor]:
    """Return per-token metrics [M] from the results of `token_loss` or its kernel."""
    low, high = objective.ratio_bounds
    policy, kl, ratio = out[3], out[4], out[5]
    return {
        "policy_loss": policy,
        "kl": kl,
        "ratio": ratio,
        "clipped_low": (ratio < low) & (advantages < 0),
        "clipped_high": (ratio > high) & (advantages > 0),
    }


def policy_loss_fwd(
    logps: torch.Tensor, rows: PolicyRows, objective: Any, tokens: Callable = _in_torch.token_loss
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of each token and its gradient in closed form.

    Args:
        logps: [M] log-probs under the policy.
        rows: The kept tokens.
        objective: An Objective.
        tokens: `token_loss`, or its kernel `policy_loss_rows` in logits.py.

    Returns:
        loss [M], its weight applied; g [M] = d(sum loss)/dlogp; and per-token metrics [M] by name: `policy_loss`
        (weighted), `kl`, `ratio`, `clipped_low`, `clipped_high`, and with sampler_logps `importance` and `sampler_gap`.
    """
    per_sequence, log_ratio, phi = objective.importance_sampling_level == "sequence", None, None
    per_token = logps - (logps if rows.old_logps is None else rows.old_logps)
    if per_sequence:
        log_ratio = sequence_mean(per_token, rows.lengths)
    importance, metrics = importance_weights(logps, rows, objective)
    if objective.surrogate == "vespo":  # it includes the importance weight in phi
        phi = vespo_phi(Tokens(per_token, rows.advantages, importance, rows.lengths), objective)
        importance = None
    # The full KL is not a function of the log-probs, see head_torch.py.
    ref = None if objective.beta == 0 or objective.full_kl else rows.ref_logps
    out = tokens(logps, rows.old_logps, log_ratio, ref, rows.advantages, rows.weights, importance, phi,
                 *kernel_knobs(objective))  # fmt: skip
    g = out[1]
    if per_sequence:
        # d(mean log-ratio)/d(logp_t) = 1/len
        g = g + sequence_mean(out[2], rows.lengths)
    return out[0], g, {**metrics, **policy_metrics(out, rows.advantages, objective)}


def importance_weights(
    logps: torch.Tensor, rows: PolicyRows, objective: Any
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """Compute I = exp(old - sampler) per token or per sequence, truncated to its bounds or set to 0 outside them.

    It has no gradient. A token without a sampler's log-prob (NaN) counts as log-ratio 0.

    Args:
        logps: [M] log-probs under the policy, used if the old ones are None.
        rows: The kept tokens.
        objective: An Objective.

    Returns:
        I [M], and the metrics `importance` and `sampler_gap` [M]. Without sampler_logps: None, and no metrics.
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

    `fwd` is `policy_loss_fwd` of this module, or of logits.py, which runs a Triton kernel.
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
