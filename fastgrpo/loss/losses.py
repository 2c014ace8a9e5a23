"""The public losses: hidden states, logits or log-probs of a batch -> loss, log-probs and metrics.

    loss = sum_n w_n (I_n s_n + beta KL_n) - entropy_coef sum_n e_n H_n

s_n is the surrogate of the objective, -min(r_n A_n, clip(r_n) A_n) for GRPO (arXiv 2402.03300 eq. 3), with the ratio
r_n = exp(logp_n - old_n). I_n is the importance weight against the sampler. docs/objectives.md explains every symbol of
every objective. These files compute the losses:

| loss             | formula in plain PyTorch (kernels/)    | Triton (kernels/) | without Triton (kernels/) |
|------------------|----------------------------------------|-------------------|---------------------------|
| grpo_loss        | reference.py: policy_loss              | logits.py         | objectives.py             |
| logits_grpo_loss | reference.py: logits_grpo_loss         | logits.py         | head_torch.py             |
| linear_grpo_loss | reference.py: linear_grpo_loss         | head.py           | head_torch.py             |
| its kl="full"    | reference.py: full_kl                  | none              | head_torch.py             |

The weights w_n are in kernels/objectives.py. tests/loss/ compares the losses with reference.py on a CPU, and
tests/kernels/interpreted/ the Triton kernels. benchmarks/bench_loss.py and bench_head.py time linear_grpo_loss.

Shapes: N tokens, B prompts or sequences, T padded length, S sequences, M kept rows, V vocabulary, D hidden. There are
two layouts. Padded: hidden [B, T, D] and per-token tensors [B, T]. Packed: hidden [N, D], per-token tensors [N], and
`cu_seqlens` [S+1], the first row of each sequence and the end of the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fastgrpo.kernels import head_torch, objectives
from fastgrpo.kernels.head_torch import Vocabulary
from fastgrpo.kernels.objectives import PolicyRows, compute_dtype, needed
from fastgrpo.loss import dispatch
from fastgrpo.loss.dispatch import HAS_TRITON, cast_for_autocast, choose_backend, compacts
from fastgrpo.loss.inputs import (
    TokenInputs,
    check_backward_tolerance,
    check_head,
    check_targets,
    check_tensor,
    keep_rows,
    reference_head,
)
from fastgrpo.loss.objective import Objective

if HAS_TRITON:
    from fastgrpo.kernels import head as head_kernels
    from fastgrpo.kernels import logits as logits_kernels
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensor = torch.Tensor


@dataclass(frozen=True)
class GRPOLossOutput:
    """Result of a loss.

    Rows with mask 0 are inactive, and without an entropy bonus also rows with weight 0 or, at beta = 0, advantage 0. An
    objective that couples tokens keeps or drops whole sequences. Metrics cover active rows only.

    The metrics are scalars: `policy_loss` (without KL and bonus), `kl`, `ratio/mean`, `ratio/max`,
    `clip_ratio/low_mean`, `clip_ratio/high_mean`, and `active_tokens`, the number of active rows. `entropy` is present
    on request or with an entropy bonus. sampler_logps add `sampling/importance_sampling_ratio/{min,mean,max}` of the
    applied weights, and `sampling/sampling_logp_difference/{mean,max}` of |old - sampler|, NaNs excluded. If there is a
    gradient, a backward_tolerance adds `head/kept_columns` and `head/dropped_mass`. The first is the share of the
    vocabulary that the backward keeps, the second the largest share of 1 - p_target that a row drops.

    Attributes:
        loss: Scalar, fp32 (fp64 for fp64 inputs). The only field that carries gradient.
        logps: Log-probs of the targets in the shape of the targets, 0 where inactive.
        active: Bool in the shape of the targets, True for active rows.
        metrics: Scalar tensors by name.
        entropies: Entropies in nats in the shape of the targets, 0 where inactive; None if the loss computed none.
    """

    loss: torch.Tensor
    logps: torch.Tensor
    active: torch.Tensor
    metrics: dict[str, torch.Tensor]
    entropies: torch.Tensor | None = None


def linear_grpo_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, *, mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None, rows: Tensor | None = None, old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None, sampler_logps: Tensor | None = None, token_weights: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None, temperature: float | Tensor = 1.0, bias: Tensor | None = None,
    logit_softcap: float | None = None, return_entropy: bool = False, ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None, ref_bias: Tensor | None = None, compact: str | None = None,
    process_group: "ProcessGroup | None" = None, backend: str = "auto", objective: Objective | None = None,
    entropy_weights: Tensor | None = None, backward_tolerance: float = 0.0, **knobs: Any,
) -> GRPOLossOutput:  # fmt: skip
    """Compute the GRPO loss of a language-model head, fused: no logits in memory, three matrix products with gradients.

    Args:
        hidden: [B, T, D] or packed [N, D]: the state that predicts the token at the same position of `targets`.
        weight: [V, D], the head.
        targets: [B, T] or [N] integers. Those of inactive rows are never read (-100 is legal).
        advantages: [B] or [B, T]; packed [S] or [N].
        mask: [B, T] or [N], positive where a token counts and 0 elsewhere. None means all tokens count.
        cu_seqlens: [S+1] integers, packed layout only. Needed by advantages [S], by the loss types grpo, dr_grpo, sapo,
            luspo and vespo, and by sequence-level ratios and importance weights.
        rows: [M] strictly increasing integers, the flat indices of the rows that carry gradient, or None. Only these
            are computed. If the objective needs whole sequences (sequence-level ratios or importance weights, vespo),
            pass all masked-in tokens of each sequence that they touch. With an entropy bonus, pass all masked-in
            tokens. Rows and cu_seqlens on the host avoid a sync.
        old_logps: Log-probs under the policy that drew the tokens. None on the first update of a rollout, where they
            equal the current ones and the ratio is 1.
        ref_logps: Log-probs under the reference. Needed if beta is not 0 and kl is not "full".
        sampler_logps: Log-probs that the sampler (vLLM, SGLang, ...) reported, NaN where it reported none. The
            surrogate is multiplied by exp(old - sampler), bounded by `importance_sampling_mode`. None means no
            importance weights.
        token_weights: [B, T] or [N], the w_n, instead of those of `loss_type`. The mask still applies.
        num_items_in_batch: Tokens of the whole step, read by dapo, cispo, vespo and the entropy bonus. None means the
            number of tokens in the mask. Values below 1 count as 1.
        temperature: Sampling temperature of the tokens, a float or one per token. At least 1e-30.
        bias: [V] or None.
        logit_softcap: As in `linear_logprob`.
        return_entropy: Whether to return `entropies` in nats, and their mean over active rows as the metric `entropy`.
        ref_hidden: [B, T, R] or [N, R], the reference's hidden states at the same tokens. R may differ from D. If
            beta is not 0 and kl is "full", ref_hidden and ref_weight are needed instead of ref_logps.
        ref_weight: [V, R], the reference's head. Its logits get the same temperature and soft-cap as the policy's.
        ref_bias: [V], the bias of the reference's head, or None.
        compact: For the triton backend without `rows`. None also computes the rows without gradient, with hidden
            states of 0, to avoid a sync; a sequence-level objective with several chunks then runs an extra forward
            pass. "sync" waits for the device and drops these rows.
        process_group: The ranks over which the rows of weight and bias are sharded, as in `linear_logprob`.
        backend: "auto" (triton for bf16 on CUDA, else chunked, and chunked for kl="full" and for a
            backward_tolerance), "chunked" or "triton".
        objective: The objective, instead of `knobs`.
        entropy_weights: [B, T] or [N], the e_n of the entropy bonus, instead of 1 / tokens of the step. The mask still
            applies. None if entropy_coef is 0.
        backward_tolerance: tau in [0, 1); 0 gives the exact gradient. The backward may drop columns without a target
            whose probabilities add up to at most tau (1 - p_target) in every row. The 1-norm of a row's gradient by its
            logits is |dz_n|_1 = 2 |g_n| (1 - p_target) / temperature; the error is then at most tau / 2 of this norm.
            The error of dH_n is at most tau |g_n| (1 - p_target) / temperature times the largest
            norm of a row of the weight (kernels/head_torch.py). Loss, log-probs and metrics stay exact. The metrics
            `head/kept_columns` and `head/dropped_mass` (at most tau) report the effect. On a GPU this costs one sync
            per chunk.
        knobs: Fields of `Objective` by name: loss_type="dapo", epsilon=0.2, beta=0.0, ...

    Returns:
        The loss, the log-probs, the active rows, and the metrics.

    Raises:
        ValueError: A tensor has the wrong shape, device or dtype; a constant input requires grad; backward_tolerance
            is combined with entropy_coef or kl="full"; beta is not 0 and the reference is missing; kl is "full" with
            backend "triton" or a process_group; entropy_weights are given and entropy_coef is 0; both objective and
            knobs are given; or a knob is invalid. On the CPU also: an active row has a target outside [0, V), or a
            number that is not finite; rows or cu_seqlens do not increase; or the mask is negative or NaN.
    """
    objective = Objective.of(objective, knobs)
    check_head(hidden, weight, bias, logit_softcap, targets)
    check_backward_tolerance(backward_tolerance, objective)
    reference = reference_head(objective, hidden, weight, ref_hidden, ref_weight, ref_bias, process_group)
    only_chunked = "kl='full'" if objective.full_kl else "backward_tolerance" if backward_tolerance else ""
    hidden, weight = cast_for_autocast("chunked" if only_chunked else backend, hidden, weight)
    path = choose_backend(backend, only_chunked, hidden=hidden, weight=weight)
    vocabulary = Vocabulary.of(weight, process_group)
    inputs = TokenInputs(targets.long(), advantages, mask, cu_seqlens, rows, old_logps, ref_logps, sampler_logps,
                         token_weights, num_items_in_batch, temperature, entropy_weights)  # fmt: skip
    kept = keep_rows(inputs, objective, compacts(compact, path, targets), compute_dtype(hidden), vocabulary.total)

    def kernel(states, kept, weight, bias):
        located, group = vocabulary.located(kept.targets, len(weight))
        return head_kernels.linear_grpo_loss(
            states, weight, bias, kept._replace(targets=located), objective, return_entropy=return_entropy,
            softcap=logit_softcap, group=group,
        )  # fmt: skip

    def plain(states, kept, weight, bias):
        return head_torch.LinearGRPO.apply(
            states, weight, bias, kept, objective, head_torch.chunk_rows(vocabulary.largest, states.device),
            needed(states, weight, bias), return_entropy, vocabulary, logit_softcap, reference, backward_tolerance,
        )  # fmt: skip

    states, head = hidden.reshape(-1, hidden.shape[-1]), (weight, bias)
    compute, kept = dispatch.select(
        "linear_grpo_loss", path, kernel, plain, states, kept, head, objective, by_name=backend == "triton",
        check=process_group is None, entropy=return_entropy, softcap=bool(logit_softcap),
    )  # fmt: skip
    return _output(*compute(states, kept, *head), kept, targets)


def logits_grpo_loss(
    logits: Tensor, targets: Tensor, advantages: Tensor, *, mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None, rows: Tensor | None = None, old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None, sampler_logps: Tensor | None = None, token_weights: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None, temperature: float | Tensor = 1.0, return_entropy: bool = False,
    inplace: bool = False, compact: str | None = None, backend: str = "auto", objective: Objective | None = None,
    **knobs: Any,
) -> GRPOLossOutput:  # fmt: skip
    """Compute the same loss from logits.

    Besides the logits, the forward keeps only vectors over the kept rows in memory. The backward allocates one gradient
    tensor in the shape and dtype of the logits. The chunked backend works on one chunk of rows in fp32 (64 MiB).

    Args:
        logits: [B, T, V] or packed [N, V] floating point, differentiable, before the temperature. Inactive rows are
            never read; their gradient is 0.
        targets: As in `linear_grpo_loss`, which also explains the short entries below.
        advantages: [B] or [B, T]; packed [S] or [N].
        mask: [B, T] or [N], or None.
        cu_seqlens: [S+1], or None.
        rows: [M] integers, or None.
        old_logps: [B, T] or [N], or None.
        ref_logps: [B, T] or [N], or None.
        sampler_logps: [B, T] or [N], or None.
        token_weights: [B, T] or [N], or None.
        num_items_in_batch: Tokens of the whole step, or None.
        temperature: A float, or per token.
        return_entropy: Whether to return `entropies` and the metric `entropy`.
        inplace: Whether to overwrite the logits with their gradient, which saves a second [N, V] tensor. The backward
            does this, or (triton, objectives per token) the forward, in one read and one write. Nothing else may then
            read the logits, and a second backward raises. Logits that cannot be flattened as a view are
            copied first, and the copy is overwritten.
        compact: None or "sync".
        backend: "auto", "chunked" or "triton".
        objective: The objective, instead of `knobs`.
        knobs: Fields of `Objective` by name.

    Returns:
        As `linear_grpo_loss`.

    Raises:
        ValueError: As `linear_grpo_loss`; or kl is "full", which needs the reference's hidden states and head.
    """
    check_tensor(logits, "logits", "floating point")
    path = choose_backend(backend, logits=logits)
    objective = Objective.of(objective, knobs)
    _refuse_full_kl(objective, "logits")
    check_targets(targets, logits, "logits")
    inputs = TokenInputs(targets.long(), advantages, mask, cu_seqlens, rows, old_logps, ref_logps, sampler_logps,
                         token_weights, num_items_in_batch, temperature)  # fmt: skip
    vocab_size = logits.shape[-1]
    kept = keep_rows(inputs, objective, compacts(compact, path, targets), compute_dtype(logits), vocab_size)

    def kernel(states, kept):
        return logits_kernels.logits_grpo_loss(states, kept, objective, return_entropy=return_entropy, inplace=inplace)

    def plain(states, kept):
        return head_torch.LogitsGRPO.apply(
            states, kept, objective, head_torch.chunk_rows(vocab_size), return_entropy, inplace
        )

    states = logits.reshape(-1, vocab_size)
    compute, kept = dispatch.select(
        "logits_grpo_loss", path, kernel, plain, states, kept, objective=objective, by_name=backend == "triton",
        entropy=return_entropy, inplace=inplace,
    )  # fmt: skip
    return _output(*compute(states, kept), kept, targets)


def grpo_loss(
    logps: Tensor, old_logps: Tensor | None, advantages: Tensor, *, mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None, rows: Tensor | None = None, ref_logps: Tensor | None = None,
    sampler_logps: Tensor | None = None, token_weights: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None, compact: str | None = None, backend: str = "auto",
    objective: Objective | None = None, **knobs: Any,
) -> GRPOLossOutput:  # fmt: skip
    """Compute the same loss from log-probs.

    Args:
        logps: [B, T] or packed [N] log-probs of the tokens under the policy, differentiable.
        old_logps: As in `linear_grpo_loss`, which also explains the short entries below.
        advantages: [B] or [B, T]; packed [S] or [N].
        mask: [B, T] or [N], or None.
        cu_seqlens: [S+1], or None.
        rows: [M] integers, or None.
        ref_logps: [B, T] or [N], or None.
        sampler_logps: [B, T] or [N], or None.
        token_weights: [B, T] or [N], or None.
        num_items_in_batch: Tokens of the whole step, or None.
        compact: None or "sync".
        backend: "auto", "chunked" or "triton".
        objective: The objective, instead of `knobs`.
        knobs: Fields of `Objective` by name.

    Returns:
        As `linear_grpo_loss`.

    Raises:
        ValueError: As `linear_grpo_loss`; or there is an entropy bonus, which needs logits; or kl is "full", which
            needs the reference's hidden states and head.
    """
    check_tensor(logps, "logps", "floating point")
    path = choose_backend(backend, logps=logps)
    objective = Objective.of(objective, knobs)
    _refuse_full_kl(objective, "log-probs")
    if objective.entropy_coef != 0:
        raise ValueError(
            f"entropy_coef={objective.entropy_coef} needs the logits; use linear_grpo_loss or logits_grpo_loss, or "
            "subtract the mean of linear_logprob's entropy"
        )
    inputs = TokenInputs(logps.detach(), advantages, mask, cu_seqlens, rows, old_logps, ref_logps, sampler_logps,
                         token_weights, num_items_in_batch)  # fmt: skip
    kept = keep_rows(inputs, objective, compacts(compact, path, logps), compute_dtype(logps))

    def kernel(states, kept):
        return objectives.PolicyLoss.apply(_kept(states, kept), kept, objective, logits_kernels.policy_loss_fwd)

    def plain(states, kept):
        return objectives.PolicyLoss.apply(_kept(states, kept), kept, objective, objectives.policy_loss_fwd)

    states = logps.reshape(-1)
    compute, kept = dispatch.select(
        "grpo_loss", path, kernel, plain, states, kept, objective=objective, by_name=backend == "triton"
    )
    return _output(*compute(states, kept), kept, logps)


def _kept(logps, kept):
    """Take the kept log-probs [M] of [N], with 0 for inactive rows."""
    logps = logps if kept.index is None else logps[kept.index]
    return logps if kept.active is None else torch.where(kept.active, logps, 0)


def _refuse_full_kl(objective, given):
    if objective.full_kl:
        raise ValueError(
            f"kl='full' cannot be computed from {given} and ref_logps; use linear_grpo_loss with ref_hidden and "
            "ref_weight, or an estimator, such as kl='k3'"
        )


def _output(
    loss: torch.Tensor, outputs: dict[str, torch.Tensor], kept: PolicyRows, like: torch.Tensor
) -> GRPOLossOutput:
    """Scatter the results [M] of the kept rows to all tokens, in the shape of `like`, and reduce them to metrics."""

    def spread(values):
        whole = values if kept.index is None else values.new_zeros(like.numel()).index_copy_(0, kept.index, values)
        return whole.view(like.shape)

    logps, active = outputs.pop("logps"), kept.active
    count = len(logps)
    if active is None:
        active = torch.ones(count, dtype=torch.bool, device=like.device)
    else:  # metrics cover only active rows
        outputs = {name: torch.where(active, values, 0) for name, values in outputs.items()}
        logps, count = torch.where(active, logps, 0), active.sum()
    divisor = max(count, 1) if isinstance(count, int) else count.clamp(min=1)
    mean = {name: values.to(logps.dtype).sum() / divisor for name, values in outputs.items()}
    metrics = {
        "policy_loss": outputs["policy_loss"].sum(),
        "kl": mean["kl"],
        "ratio/mean": mean["ratio"],
        "ratio/max": outputs["ratio"].amax() if len(outputs["ratio"]) else mean["ratio"],
        "clip_ratio/low_mean": mean["clipped_low"],
        "clip_ratio/high_mean": mean["clipped_high"],
        "active_tokens": active.new_full((), count, dtype=torch.int64) if isinstance(count, int) else count,
    }
    if "entropy" in mean:
        metrics["entropy"] = mean["entropy"]
    if "kept_columns" in outputs:
        dropped = outputs["dropped_mass"]
        metrics["head/kept_columns"] = mean["kept_columns"]
        metrics["head/dropped_mass"] = dropped.amax() if len(dropped) else mean["dropped_mass"]
    if "importance" in outputs:
        metrics |= _sampler_metrics(outputs["importance"], outputs["sampler_gap"], kept.active, divisor)
    entropies = spread(outputs["entropy"]) if "entropy" in outputs else None
    return GRPOLossOutput(loss, spread(logps), spread(active), metrics, entropies)


def _sampler_metrics(importance, gap, active, count):
    """Reduce the importance weights [M] and gaps [M] (NaN where the sampler gave no log-prob). No rows give 0."""
    known = ~gap.isnan() if active is None else ~gap.isnan() & active
    gap = torch.where(known, gap, 0.0)
    nothing = importance.new_zeros(1)
    lowest = importance if active is None else torch.where(active | ~active.any(), importance, torch.inf)
    return {
        "sampling/importance_sampling_ratio/min": lowest.amin() if len(importance) else nothing[0],
        "sampling/importance_sampling_ratio/mean": importance.sum() / count,
        "sampling/importance_sampling_ratio/max": torch.cat([importance, nothing]).amax(),
        "sampling/sampling_logp_difference/mean": gap.sum() / known.sum().clamp(min=1),
        "sampling/sampling_logp_difference/max": torch.cat([gap, nothing.to(gap)]).amax(),
    }
