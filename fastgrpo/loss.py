"""The public losses: hidden states (or log-probs) and a batch -> loss, log-probs, metrics. Imports no transformers.

    loss = sum_n w_n ( -min(r_n A_n, clip(r_n, 1 - eps, 1 + eps_high) A_n) + beta KL_n ),   r_n = exp(logp_n - old_n)

Shapes: N tokens, B prompts or sequences, T padded length, S sequences, M kept rows, V vocabulary, D hidden. Two layouts
are read: padded, hidden [B, T, D] with per-token tensors [B, T]; and packed, hidden [N, D] with per-token tensors [N]
and `cu_seqlens` [S+1], the row where each sequence starts and the end of the last.
"""

import logging
from dataclasses import dataclass
from functools import cache

import torch

from fastgrpo.kernels import chunked
from fastgrpo.objective import Objective

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "chunked")


@dataclass(frozen=True)
class GRPOLossOutput:
    """What a loss returns.

    loss: scalar, fp32 (fp64 for fp64 inputs); the only field that carries gradient.
    logps: log-probs of the targets in the targets' shape, 0 where not active.
    active: bool, same shape: the rows that were computed. Rows that carry no gradient (mask 0, weight 0, and at
        beta = 0 advantage 0) are not, and no metric covers them.
    metrics: scalars: `policy_loss`, `kl`, `ratio/mean`, `ratio/max`, `clip_ratio/low_mean`, `clip_ratio/high_mean`,
        `entropy` on request, and `active_tokens`, how many rows these are means over.
    """

    loss: torch.Tensor
    logps: torch.Tensor
    active: torch.Tensor
    metrics: dict[str, torch.Tensor]


def linear_logprob(hidden, weight, targets, *, bias=None, temperature=1.0, return_entropy=False, backend="auto"):
    """Log-probs of `targets` under softmax((hidden @ weight.T + bias) / temperature), without the logits in memory.

    Args:
        hidden: [..., D] floating point. weight: [V, D]. targets: [...] integers in [0, V). bias: [V] or None.
        temperature: float, or tensor [...].
        return_entropy: also return the entropy, in nats.
        backend: "auto" or "chunked".

    Returns:
        logps [...] fp32 (fp64 for fp64 inputs), differentiable by hidden, weight and bias; with `return_entropy`,
        (logps, entropy), both differentiable.

    Raises:
        ValueError: a shape that does not fit, a target outside [0, V), an unknown backend.
    """
    _choose_backend(backend)
    _check_head(hidden, weight, bias, targets)
    flat = targets.reshape(-1).long()
    _check_targets(flat, weight.shape[0])
    logps, entropy = chunked.LinearLogprob.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        flat,
        _per_token(temperature, "temperature", targets.shape),
        chunked.chunk_rows(weight.shape[0]),
        return_entropy,
    )
    logps = logps.view(targets.shape)
    return (logps, entropy.view(targets.shape)) if return_entropy else logps


def linear_grpo_loss(hidden, weight, targets, advantages, *, mask=None, cu_seqlens=None, rows=None, old_logps=None,
                     ref_logps=None, token_weights=None, loss_type="dapo", importance_sampling_level="token",
                     epsilon=0.2, epsilon_high=None, delta=None, beta=0.0, kl="k3", temperature=1.0,
                     num_items_in_batch=None, max_completion_length=None, bias=None, return_entropy=False,
                     backend="auto"):  # fmt: skip
    """The GRPO loss of a language-model head, fused: no full-vocabulary logits, three matrix products with gradients.

    Args:
        hidden: [B, T, D] or packed [N, D]; the state that predicts the token at the same place of `targets`.
        weight: [V, D], the head; bias: [V] or None.
        targets: [B, T] or [N] integers; those of inactive rows are never read (-100 is legal).
        advantages: [B] or [B, T]; packed [S] or [N].
        mask: [B, T] or [N], nonzero where a token counts; None is everywhere.
        cu_seqlens: [S+1] integers, packed layout only; needed by advantages [S], by loss types grpo and dr_grpo, and
            by sequence-level ratios.
        rows: [M] int64, increasing: the flat indices of the rows that carry gradient, where the caller knows them.
            Only these are computed. With sequence-level ratios it must hold all tokens of the sequences it touches.
        old_logps: log-probs under the policy that drew the tokens; None on the first update of a rollout, where they
            equal the current ones and the ratio is 1.
        ref_logps: log-probs under the reference; needed where beta is not 0.
        token_weights: [B, T] or [N]: the w_n, instead of those of `loss_type`; the mask still applies.
        num_items_in_batch: tokens of the whole step, read by dapo alone. max_completion_length: read by dr_grpo.
        loss_type ... kl, max_completion_length: see `Objective`.
        temperature: float, or per token; the one the tokens were drawn at.
        return_entropy: add the mean `entropy` over active rows, in nats, to the metrics.
        backend: "auto" or "chunked".

    Returns:
        GRPOLossOutput.

    Raises:
        ValueError: a shape that does not fit; old_logps, ref_logps or advantages that require grad; beta without
            ref_logps; an active target outside [0, V); what `Objective` refuses.
    """
    _choose_backend(backend)
    objective = Objective(
        loss_type, importance_sampling_level, epsilon, epsilon_high, delta, beta, kl, max_completion_length
    )
    _check_head(hidden, weight, bias, targets)
    layout = _Layout.of(targets, cu_seqlens)
    kept = _keep_rows(layout, objective, advantages, mask, rows, old_logps, ref_logps, token_weights,
                      num_items_in_batch, temperature, targets.long())  # fmt: skip
    _check_targets(kept.targets, weight.shape[0])
    grad = torch.is_grad_enabled()
    needs = tuple(grad and t is not None and t.requires_grad for t in (hidden, weight, bias))
    loss, outputs = chunked.LinearGRPO.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        kept,
        objective,
        chunked.chunk_rows(weight.shape[0]),
        needs,
        return_entropy,
    )
    return _output(loss, outputs, kept.index, targets)


def grpo_loss(logps, old_logps, advantages, *, mask=None, cu_seqlens=None, rows=None, ref_logps=None,
              token_weights=None, loss_type="dapo", importance_sampling_level="token", epsilon=0.2, epsilon_high=None,
              delta=None, beta=0.0, kl="k3", num_items_in_batch=None, max_completion_length=None,
              backend="auto"):  # fmt: skip
    """The same loss from log-probs: logps [B, T] or packed [N], differentiable; every other argument as above.

    Returns:
        GRPOLossOutput. Raises: as `linear_grpo_loss`.
    """
    _choose_backend(backend)
    objective = Objective(
        loss_type, importance_sampling_level, epsilon, epsilon_high, delta, beta, kl, max_completion_length
    )
    layout = _Layout.of(logps, cu_seqlens)
    kept = _keep_rows(layout, objective, advantages, mask, rows, old_logps, ref_logps, token_weights,
                      num_items_in_batch, 1.0, logps.detach())  # fmt: skip
    flat = logps.reshape(-1)
    loss, outputs = chunked.PolicyLoss.apply(flat if kept.index is None else flat[kept.index], kept, objective)
    return _output(loss, outputs, kept.index, logps)


@dataclass(frozen=True)
class _Layout:
    """Where sequences lie among the N flat tokens. shape: of per-token tensors. cu_seqlens: [S+1] or None."""

    shape: torch.Size
    cu_seqlens: torch.Tensor | None

    @classmethod
    def of(cls, per_token, cu_seqlens):
        shape = per_token.shape
        if per_token.ndim == 2:
            if cu_seqlens is not None:
                raise ValueError(f"cu_seqlens goes with the packed layout [N], but the tokens are {tuple(shape)}")
            starts = torch.arange(shape[0] + 1, device=per_token.device) * shape[1]
            return cls(shape, starts)
        if per_token.ndim != 1:
            raise ValueError(f"tokens must be [B, T] or packed [N], got {tuple(shape)}")
        if cu_seqlens is not None:
            cu_seqlens = torch.as_tensor(cu_seqlens, device=per_token.device).long()
            on_host = cu_seqlens.device.type == "cpu"
            if cu_seqlens.ndim != 1 or (on_host and not _is_partition(cu_seqlens, shape[0])):
                raise ValueError(f"cu_seqlens must rise from 0 to N={shape[0]}, got {cu_seqlens.tolist()}")
        return cls(shape, cu_seqlens)

    def per_token(self, value, name):
        """[S], [B, T] or [N] -> flat [N]."""
        if value.shape == self.shape:
            return value.reshape(-1)
        if self.cu_seqlens is not None and value.shape == (len(self.cu_seqlens) - 1,):
            return value.repeat_interleave(self.cu_seqlens.diff(), output_size=self.shape.numel())
        hint = "" if self.cu_seqlens is not None else " (one value per sequence needs cu_seqlens)"
        raise ValueError(
            f"{name} must be per token {tuple(self.shape)} or per sequence, got {tuple(value.shape)}{hint}"
        )


def _is_partition(cu_seqlens, total):
    return (
        len(cu_seqlens) >= 1 and cu_seqlens[0] == 0 and cu_seqlens[-1] == total and bool((cu_seqlens.diff() >= 0).all())
    )


def _keep_rows(layout, objective, advantages, mask, rows, old_logps, ref_logps, token_weights, num_items_in_batch,
               temperature, targets):  # fmt: skip
    """Flatten everything, compute the weights over all rows, then drop the rows that carry no gradient."""
    if objective.beta != 0 and ref_logps is None:
        raise ValueError(f"beta={objective.beta} needs ref_logps; pass them, or beta=0")
    if objective.beta == 0:
        ref_logps = None
    for name, value in (("advantages", advantages), ("old_logps", old_logps), ("ref_logps", ref_logps)):
        if value is not None and value.requires_grad:
            raise ValueError(f"{name} must not require grad: the loss differentiates by the policy alone; detach it")
    if layout.cu_seqlens is None and (
        objective.importance_sampling_level == "sequence" or (objective.needs_sequences and token_weights is None)
    ):
        raise ValueError(
            f"cu_seqlens is needed by loss_type={objective.loss_type!r}, "
            f"importance_sampling_level={objective.importance_sampling_level!r} in the packed layout"
        )
    dtype = torch.float64 if advantages.dtype == torch.float64 else torch.float32
    total = layout.shape.numel()
    mask = _per_token(mask, "mask", layout.shape)
    mask = torch.ones(total, dtype=torch.bool, device=targets.device) if mask is None else mask != 0
    if token_weights is None:
        weights = objective.token_weights(mask, layout.cu_seqlens, num_items_in_batch)
    else:
        weights = _per_token(token_weights, "token_weights", layout.shape).masked_fill(~mask, 0)
    advantages = layout.per_token(advantages, "advantages").to(dtype)
    old_logps = _per_token(old_logps, "old_logps", layout.shape)
    ref_logps = _per_token(ref_logps, "ref_logps", layout.shape)
    temperature = _per_token(temperature, "temperature", layout.shape)
    index = _active_rows(layout, objective, mask, weights, advantages) if rows is None else rows
    if len(index) == total:
        index = None

    def keep(value):
        return value if index is None or not isinstance(value, torch.Tensor) else value[index]

    lengths = None
    if objective.importance_sampling_level == "sequence":
        bounds = layout.cu_seqlens if index is None else torch.searchsorted(index, layout.cu_seqlens)
        lengths = bounds.diff()
    return chunked.PolicyRows(
        index,
        keep(targets.reshape(-1)),
        keep(temperature),
        keep(advantages),
        keep(weights.to(dtype)),
        keep(old_logps),
        keep(ref_logps),
        lengths,
    )


def _active_rows(layout, objective, mask, weights, advantages):
    """Flat indices of the rows that carry gradient: masked-in, weighted, and (at beta = 0) of nonzero advantage."""
    active = mask & (weights != 0)
    if objective.beta == 0:
        active &= advantages != 0
    if objective.importance_sampling_level == "sequence":
        # A token of no weight still moves its sequence's ratio: a sequence is kept or dropped as a whole.
        lengths = layout.cu_seqlens.diff()
        any_active = torch.segment_reduce(active.float(), "max", lengths=lengths, initial=0) > 0
        active = mask & any_active.repeat_interleave(lengths, output_size=len(mask))
    return active.nonzero()[:, 0]


def _per_token(value, name, shape):
    """Floats and None pass; a tensor must have the tokens' shape and comes back flat."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != shape:
        raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(value.shape)}")
    return value.reshape(-1)


def _output(loss, outputs, index, like):
    logps = outputs.pop("logps")
    if index is None:
        active = torch.ones(like.shape, dtype=torch.bool, device=like.device)
    else:
        active = torch.zeros(like.numel(), dtype=torch.bool, device=like.device).index_fill_(0, index, True)
        logps = logps.new_zeros(like.numel()).index_copy_(0, index, logps)
    count = len(outputs["ratio"])
    mean = {name: values.to(logps.dtype).sum() / max(count, 1) for name, values in outputs.items()}
    metrics = {
        "policy_loss": outputs["policy_loss"].sum(),
        "kl": mean["kl"],
        "ratio/mean": mean["ratio"],
        "ratio/max": outputs["ratio"].amax() if count else mean["ratio"],
        "clip_ratio/low_mean": mean["clipped_low"],
        "clip_ratio/high_mean": mean["clipped_high"],
        "active_tokens": torch.tensor(count),
    }
    if "entropy" in mean:
        metrics["entropy"] = mean["entropy"]
    return GRPOLossOutput(loss, logps.view(like.shape), active.view(like.shape), metrics)


def _check_head(hidden, weight, bias, targets):
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight must be [V, D] with D={hidden.shape[-1]} of hidden {tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V]={tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"targets must be {tuple(hidden.shape[:-1])} like hidden, got {tuple(targets.shape)}")
    for name, value in (("hidden", hidden), ("weight", weight)):
        if not value.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {value.dtype}")
    if targets.is_floating_point():
        raise ValueError(f"targets must be integers, got {targets.dtype}")


def _check_targets(targets, vocab_size):
    """On the CPU alone: a look at GPU memory would stall it."""
    if targets.device.type == "cpu" and targets.numel():
        low, high = targets.min().item(), targets.max().item()
        if low < 0 or high >= vocab_size:
            raise ValueError(f"targets must be in [0, {vocab_size}) on active rows, got {low} to {high}")


def _choose_backend(backend):
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        _log_choice("chunked")


@cache
def _log_choice(backend):
    logger.info("backend='auto' runs the %s path", backend)
