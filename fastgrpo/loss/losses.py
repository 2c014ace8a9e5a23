"""The public losses: hidden states, logits or log-probs and a batch -> loss, log-probs, metrics. No transformers here.

    loss = sum_n w_n (I_n s_n + beta KL_n) - entropy_coef sum_n e_n H_n

s_n is the surrogate of the objective, -min(r_n A_n, clip(r_n) A_n) for GRPO, with r_n = exp(logp_n - old_n); I_n weighs
the token against the sampler; every objective stands in docs/objectives.md, its knobs in `Objective`.

Shapes: N tokens, B prompts or sequences, T padded length, S sequences, M kept rows, V vocabulary, D hidden. Two layouts
are read: padded, hidden [B, T, D] with per-token tensors [B, T]; and packed, hidden [N, D] with per-token tensors [N]
and `cu_seqlens` [S+1], the row where each sequence starts and the end of the last.
"""

from dataclasses import dataclass

import torch

from fastgrpo.kernels import chunked, chunked_logits, objectives
from fastgrpo.kernels.products import needed
from fastgrpo.kernels.softmax import Vocabulary
from fastgrpo.loss.checks import (
    HAS_TRITON,
    _autocast,
    _check_head,
    _check_targets,
    _check_token_ids,
    _choose_backend,
    _compacts,
)
from fastgrpo.loss.objective import Objective
from fastgrpo.loss.rows import Layout, keep_rows, per_token

if HAS_TRITON:
    from fastgrpo.kernels import linear_grpo, logits_grpo, policy_loss
    from fastgrpo.kernels import linear_logprob as triton_logprob


@dataclass(frozen=True)
class GRPOLossOutput:
    """What a loss returns.

    loss: scalar, fp32 (fp64 for fp64 inputs); the only field that carries gradient.
    logps: log-probs of the targets in the targets' shape, 0 where not active.
    active: bool, same shape: the rows that were computed. Rows that carry no gradient (mask 0, weight 0, and at
        beta = 0 advantage 0, unless there is an entropy bonus) are not, and no metric covers them.
    metrics: scalars: `policy_loss` (without KL and bonus), `kl`, `ratio/mean`, `ratio/max`, `clip_ratio/low_mean`,
        `clip_ratio/high_mean`, `active_tokens`, how many rows these are means over; `entropy` on request or with a
        bonus; and with sampler_logps `sampling/importance_sampling_ratio/{min,mean,max}`, of the weights in use, and
        `sampling/sampling_logp_difference/{mean,max}`, of |old - sampler| where the sampler gave one.
    """

    loss: torch.Tensor
    logps: torch.Tensor
    active: torch.Tensor
    metrics: dict[str, torch.Tensor]


def linear_logprob(hidden, weight, targets, *, bias=None, logit_softcap=None, temperature=1.0, return_entropy=False,
                   process_group=None, backend="auto"):  # fmt: skip
    """Log-probs of `targets` under softmax(softcap(hidden @ weight.T + bias) / temperature), logits never in memory.

    Args:
        hidden: [..., D] floating point. weight: [V, D]. targets: [...] integers in [0, V). bias: [V] or None.
        logit_softcap: softcap(x) = cap tanh(x / cap), as in Gemma 2; None is none.
        temperature: float, or tensor [...].
        return_entropy: also return the entropy, in nats.
        process_group: of torch.distributed, where weight and bias are this rank's rows of a head sharded over the
            group in rank order, of equal or unequal size. Targets stay global ids; everything but weight and bias is
            the same on every rank, the results too. The gradient of hidden comes back whole on every rank, those of
            weight and bias for the shard. Every rank must make the call, and run its backward.
        backend: "auto" (triton for bf16, fp16 and fp32 on CUDA, else chunked), "chunked" or "triton".

    Returns:
        logps [...] fp32 (fp64 for fp64 inputs), differentiable by hidden, weight and bias; with `return_entropy`,
        (logps, entropy), both differentiable.

    Raises:
        ValueError: a shape that does not fit, a target outside [0, V), a rank without rows, an unknown backend.
    """
    _check_head(hidden, weight, bias, logit_softcap, targets)
    hidden, weight = _autocast(backend, hidden, weight)
    backend = _choose_backend(backend, hidden=hidden, weight=weight)
    vocabulary = Vocabulary.of(weight, process_group)
    flat = targets.reshape(-1).long()
    _check_targets(flat, vocabulary.total)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    temperature = per_token(temperature, "temperature", targets.shape)
    if backend == "triton":
        located, group = vocabulary.located(flat, len(weight))
        logps, entropy = triton_logprob.linear_logprob(
            hidden, weight, located, bias=bias, temperature=temperature, softcap=logit_softcap,
            return_entropy=return_entropy, group=group,
        )  # fmt: skip
    else:
        logps, entropy = chunked.LinearLogprob.apply(
            hidden, weight, bias, flat, temperature, chunked.chunk_rows(vocabulary.largest), return_entropy, vocabulary,
            logit_softcap,
        )  # fmt: skip
    logps = logps.view(targets.shape)
    return (logps, entropy.view(targets.shape)) if return_entropy else logps


def linear_grpo_loss(hidden, weight, targets, advantages, *, mask=None, cu_seqlens=None, rows=None, old_logps=None,
                     ref_logps=None, sampler_logps=None, token_weights=None, num_items_in_batch=None, temperature=1.0,
                     bias=None, logit_softcap=None, return_entropy=False, compact=None, process_group=None,
                     backend="auto", objective=None, **knobs):  # fmt: skip
    """The GRPO loss of a language-model head, fused: no full-vocabulary logits, three matrix products with gradients.

    Args:
        hidden: [B, T, D] or packed [N, D]; the state that predicts the token at the same place of `targets`.
        weight: [V, D], the head; bias: [V] or None. logit_softcap: see `linear_logprob`.
        targets: [B, T] or [N] integers; those of inactive rows are never read (-100 is legal).
        advantages: [B] or [B, T]; packed [S] or [N].
        mask: [B, T] or [N], nonzero where a token counts; None is everywhere.
        cu_seqlens: [S+1] integers, packed layout only; needed by advantages [S], by loss types grpo, dr_grpo, sapo,
            luspo and vespo, and by sequence-level ratios and importance weights.
        rows: [M] int64, increasing: the flat indices of the rows that carry gradient, where the caller knows them.
            Only these are computed. Where the objective looks at whole sequences (sequence-level ratios or importance
            weights, vespo) they must be all the masked-in tokens of the sequences they touch; with an entropy bonus
            all masked-in tokens. On the host, with cu_seqlens there too, they cost no wait for the device.
        old_logps: log-probs under the policy that drew the tokens; None on the first update of a rollout, where they
            equal the current ones and the ratio is 1.
        ref_logps: log-probs under the reference; needed where beta is not 0.
        sampler_logps: log-probs that the sampler (vLLM, SGLang, ...) reported, NaN where it did not; they weigh the
            surrogate by exp(old - sampler) as `importance_sampling_mode` and its bounds say. None: no weights.
        token_weights: [B, T] or [N]: the w_n, instead of those of `loss_type`; the mask still applies.
        num_items_in_batch: tokens of the whole step, read by dapo, cispo, vespo and the entropy bonus; None counts
            the mask.
        temperature: float, or per token; the one the tokens were drawn at.
        return_entropy: add the mean `entropy` over active rows, in nats, to the metrics.
        compact: read by the triton backend where `rows` is not given. None: rows without gradient are computed with
            hidden states of 0, since only the device knows which they are (and sequence-level objectives of more than
            one chunk take a forward pass ahead). "sync": wait for the device to learn it, and leave them out.
        process_group: where weight and bias are sharded by rows, see `linear_logprob`.
        backend: "auto" (triton for bf16, fp16 and fp32 on CUDA, else chunked), "chunked" or "triton".
        objective: an `Objective`; or its fields by name, in its place: loss_type="dapo", epsilon=0.2, beta=0.0, ...

    Returns:
        GRPOLossOutput.

    Raises:
        ValueError: a shape that does not fit; log-probs or advantages given that require grad; beta without ref_logps;
            an active target outside [0, V); objective together with its fields; what `Objective` refuses.
    """
    objective = _objective(objective, knobs)
    _check_head(hidden, weight, bias, logit_softcap, targets)
    hidden, weight = _autocast(backend, hidden, weight)
    backend = _choose_backend(backend, hidden=hidden, weight=weight)
    vocabulary = Vocabulary.of(weight, process_group)
    kept = keep_rows(Layout.of(targets, cu_seqlens), objective, targets.long(), advantages, mask=mask, rows=rows,
                     old_logps=old_logps, ref_logps=ref_logps, sampler_logps=sampler_logps, token_weights=token_weights,
                     num_items_in_batch=num_items_in_batch, temperature=temperature,
                     compact=_compacts(compact, backend, targets))  # fmt: skip
    _check_targets(kept.targets, vocabulary.total)
    flat = hidden.reshape(-1, hidden.shape[-1])
    if backend == "triton":
        located, group = vocabulary.located(kept.targets, len(weight))
        loss, outputs = linear_grpo.linear_grpo_loss(
            flat, weight, bias, kept._replace(targets=located), objective, return_entropy=return_entropy,
            softcap=logit_softcap, group=group,
        )  # fmt: skip
    else:
        needs = needed(hidden, weight, bias)
        loss, outputs = chunked.LinearGRPO.apply(
            flat, weight, bias, kept, objective, chunked.chunk_rows(vocabulary.largest), needs, return_entropy,
            vocabulary, logit_softcap,
        )  # fmt: skip
    return _output(loss, outputs, kept, targets)


def logits_grpo_loss(logits, targets, advantages, *, mask=None, cu_seqlens=None, rows=None, old_logps=None,
                     ref_logps=None, sampler_logps=None, token_weights=None, num_items_in_batch=None, temperature=1.0,
                     return_entropy=False, inplace=False, compact=None, backend="auto", objective=None,
                     **knobs):  # fmt: skip
    """The same loss for those who already have logits: [B, T, V] or packed [N, V], differentiable.

    Memory beside the logits: the forward keeps vectors of the kept rows alone; the backward makes one gradient tensor
    in the logits' shape and dtype. The chunked backend works on one chunk of rows in fp32 (64 MiB).

    Args:
        logits: floating point, before the temperature. Rows that are not active are never read; their gradient is 0.
        inplace: the gradient is written over the logits, so that there is no second [N, V] tensor: by the backward, or
            (triton, where no token's loss looks at its sequence) already by the forward, in one read and one write.
            Their values are gone then: nothing else may need them, and a second backward is an error that autograd
            raises.
            (Logits that no view can flatten are copied first, and the copy is overwritten.)
        Everything else: see `linear_grpo_loss`.

    Returns:
        GRPOLossOutput. Raises: as `linear_grpo_loss`.
    """
    backend = _choose_backend(backend, logits=logits)
    objective = _objective(objective, knobs)
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    _check_token_ids(targets, logits, "logits")
    kept = keep_rows(Layout.of(targets, cu_seqlens), objective, targets.long(), advantages, mask=mask, rows=rows,
                     old_logps=old_logps, ref_logps=ref_logps, sampler_logps=sampler_logps, token_weights=token_weights,
                     num_items_in_batch=num_items_in_batch, temperature=temperature,
                     compact=_compacts(compact, backend, targets))  # fmt: skip
    vocab_size = logits.shape[-1]
    _check_targets(kept.targets, vocab_size)
    flat = logits.reshape(-1, vocab_size)
    if backend == "triton":
        loss, outputs = logits_grpo.logits_grpo_loss(
            flat, kept, objective, return_entropy=return_entropy, inplace=inplace
        )
    else:
        loss, outputs = chunked_logits.LogitsGRPO.apply(
            flat, kept, objective, chunked.chunk_rows(vocab_size), return_entropy, inplace
        )
    return _output(loss, outputs, kept, targets)


def grpo_loss(logps, old_logps, advantages, *, mask=None, cu_seqlens=None, rows=None, ref_logps=None,
              sampler_logps=None, token_weights=None, num_items_in_batch=None, compact=None, backend="auto",
              objective=None, **knobs):  # fmt: skip
    """The same loss from log-probs: logps [B, T] or packed [N], differentiable; every other argument as above.

    Returns:
        GRPOLossOutput. Raises: as `linear_grpo_loss`, and ValueError for an entropy bonus, which needs logits.
    """
    backend = _choose_backend(backend, logps=logps)
    objective = _objective(objective, knobs)
    if objective.entropy_coef != 0:
        raise ValueError(
            f"entropy_coef={objective.entropy_coef} needs the logits: use linear_grpo_loss or logits_grpo_loss, or "
            "subtract the mean of linear_logprob's entropy"
        )
    kept = keep_rows(Layout.of(logps, cu_seqlens), objective, logps.detach(), advantages, mask=mask, rows=rows,
                     old_logps=old_logps, ref_logps=ref_logps, sampler_logps=sampler_logps, token_weights=token_weights,
                     num_items_in_batch=num_items_in_batch, temperature=1.0,
                     compact=_compacts(compact, backend, logps))  # fmt: skip
    flat = logps.reshape(-1)
    flat = flat if kept.index is None else flat[kept.index]
    if kept.active is not None:
        flat = torch.where(kept.active, flat, 0)
    fwd = (policy_loss if backend == "triton" else objectives).policy_loss_fwd
    loss, outputs = objectives.PolicyLoss.apply(flat, kept, objective, fwd)
    return _output(loss, outputs, kept, logps)


def _objective(objective, knobs):
    if objective is None:
        return Objective(**knobs)
    if knobs:
        raise ValueError(f"{', '.join(knobs)} are fields of objective: pass either them or objective, not both")
    return objective


def _output(loss, outputs, kept, like):
    logps, index = outputs.pop("logps"), kept.index
    count, active = len(logps), torch.ones(like.shape, dtype=torch.bool, device=like.device)
    if kept.active is not None:  # metrics cover active rows alone
        outputs = {name: torch.where(kept.active, values, 0) for name, values in outputs.items()}
        logps = torch.where(kept.active, logps, 0)
        count = kept.active.sum()
    if index is not None:
        active = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
        active = (
            active.index_fill_(0, index, True) if kept.active is None else active.index_copy_(0, index, kept.active)
        )
        logps = logps.new_zeros(like.numel()).index_copy_(0, index, logps)
    divisor = max(count, 1) if isinstance(count, int) else count.clamp(min=1)
    mean = {name: values.to(logps.dtype).sum() / divisor for name, values in outputs.items()}
    metrics = {
        "policy_loss": outputs["policy_loss"].sum(),
        "kl": mean["kl"],
        "ratio/mean": mean["ratio"],
        "ratio/max": outputs["ratio"].amax() if len(outputs["ratio"]) else mean["ratio"],
        "clip_ratio/low_mean": mean["clipped_low"],
        "clip_ratio/high_mean": mean["clipped_high"],
        "active_tokens": torch.tensor(count) if isinstance(count, int) else count,
    }
    if "entropy" in mean:
        metrics["entropy"] = mean["entropy"]
    if "importance" in outputs:
        metrics |= _sampler_metrics(outputs["importance"], outputs["sampler_gap"], kept.active, divisor)
    return GRPOLossOutput(loss, logps.view(like.shape), active.view(like.shape), metrics)


def _sampler_metrics(importance, gap, active, count):
    """importance [M]; gap [M], NaN where the sampler gave no log-prob. No rows: all 0."""
    known = ~gap.isnan() if active is None else ~gap.isnan() & active
    gap = torch.where(known, gap, 0.0)
    nothing = importance.new_zeros(1)
    lowest = importance if active is None else torch.where(active, importance, torch.inf)
    return {
        "sampling/importance_sampling_ratio/min": lowest.amin() if len(importance) else nothing[0],
        "sampling/importance_sampling_ratio/mean": importance.sum() / count,
        "sampling/importance_sampling_ratio/max": torch.cat([importance, nothing]).amax(),
        "sampling/sampling_logp_difference/mean": gap.sum() / known.sum().clamp(min=1),
        "sampling/sampling_logp_difference/max": torch.cat([gap, nothing.to(gap)]).amax(),
    }
