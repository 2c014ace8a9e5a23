"""The output of a loss: the scalar, the log-probs, which rows were computed, and the metrics over them.

Shapes: N tokens, M kept rows (the tokens that were computed).
"""

from dataclasses import dataclass

import torch

from fastgrpo.kernels.objectives import PolicyRows


@dataclass(frozen=True)
class GRPOLossOutput:
    """What a loss returns.

    Rows that carry no gradient (mask 0, weight 0, and at beta = 0 advantage 0, unless there is an entropy bonus) are
    not active, and no metric covers them.

    The metrics are scalars: `policy_loss` (without KL and bonus), `kl`, `ratio/mean`, `ratio/max`,
    `clip_ratio/low_mean`, `clip_ratio/high_mean`, and `active_tokens`, the number of rows that these are means over.
    `entropy` is there on request or with an entropy bonus. With sampler_logps there are
    `sampling/importance_sampling_ratio/{min,mean,max}` of the weights in use, and
    `sampling/sampling_logp_difference/{mean,max}` of |old - sampler| where the sampler gave a log-prob. With a
    backward_tolerance, and where there is a gradient, there are `head/kept_columns`, the share of the vocabulary that
    the backward keeps, and `head/dropped_mass`, the largest share of its 1 - p_target that a row leaves out.

    Attributes:
        loss: Scalar, fp32 (fp64 for fp64 inputs). The only field that carries gradient.
        logps: Log-probs of the targets in the targets' shape, 0 where not active.
        active: Bool in the targets' shape: the rows that were computed.
        metrics: Scalar tensors by name.
        entropies: Entropies in nats in the targets' shape, 0 where not active; None where the loss computed none.
    """

    loss: torch.Tensor
    logps: torch.Tensor
    active: torch.Tensor
    metrics: dict[str, torch.Tensor]
    entropies: torch.Tensor | None = None


def loss_output(
    loss: torch.Tensor, outputs: dict[str, torch.Tensor], kept: PolicyRows, like: torch.Tensor
) -> GRPOLossOutput:
    """Spread the results of the kept rows over all tokens, and reduce them to metrics.

    Args:
        loss: Scalar.
        outputs: [M] values by name, as the autograd functions of kernels/ return them: `logps`, `policy_loss`, `kl`,
            `ratio`, `clipped_low`, `clipped_high`, and where they were asked for `entropy`, `importance`,
            `sampler_gap`, `kept_columns` and `dropped_mass`.
        kept: The kept rows.
        like: A tensor in the shape of the tokens, [B, T] or [N].
    """
    logps, index = outputs.pop("logps"), kept.index
    count, active = len(logps), torch.ones(like.shape, dtype=torch.bool, device=like.device)
    if kept.active is not None:  # metrics cover active rows alone
        outputs = {name: torch.where(kept.active, values, 0) for name, values in outputs.items()}
        logps = torch.where(kept.active, logps, 0)
        count = kept.active.sum()
    entropies = outputs.get("entropy")
    if index is not None:
        active = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
        active = (
            active.index_fill_(0, index, True) if kept.active is None else active.index_copy_(0, index, kept.active)
        )
        logps = logps.new_zeros(like.numel()).index_copy_(0, index, logps)
        if entropies is not None:
            entropies = entropies.new_zeros(like.numel()).index_copy_(0, index, entropies)
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
    if "kept_columns" in outputs:
        dropped = outputs["dropped_mass"]
        metrics["head/kept_columns"] = mean["kept_columns"]
        metrics["head/dropped_mass"] = dropped.amax() if len(dropped) else mean["dropped_mass"]
    if "importance" in outputs:
        metrics |= _sampler_metrics(outputs["importance"], outputs["sampler_gap"], kept.active, divisor)
    entropies = None if entropies is None else entropies.view(like.shape)
    return GRPOLossOutput(loss, logps.view(like.shape), active.view(like.shape), metrics, entropies)


def _sampler_metrics(importance, gap, active, count):
    """Reduce the importance weights [M], and the gaps [M], NaN where the sampler gave no log-prob. No rows give 0."""
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
