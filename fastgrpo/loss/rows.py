"""From the tensors a person passes to the rows that the kernels compute: layout, weights, and which rows matter.

Shapes: N tokens, B prompts or sequences, T padded length, S sequences, M kept rows.
"""

from dataclasses import dataclass

import torch

from fastgrpo.kernels.policy_rows import PolicyRows


@dataclass(frozen=True)
class Layout:
    """Where sequences lie among the N flat tokens. shape: of per-token tensors. cu_seqlens: [S+1] or None.

    host_cu_seqlens: the same on the host, where it is known there.
    """

    shape: torch.Size
    cu_seqlens: torch.Tensor | None
    host_cu_seqlens: torch.Tensor | None = None

    @classmethod
    def of(cls, per_token, cu_seqlens):
        """per_token: [B, T], or packed [N]. ValueError where cu_seqlens does not partition it."""
        shape = per_token.shape
        if per_token.ndim == 2:
            if cu_seqlens is not None:
                raise ValueError(f"cu_seqlens goes with the packed layout [N], but the tokens are {tuple(shape)}")
            starts = torch.arange(shape[0] + 1, device=per_token.device) * shape[1]
            on_host = None if torch.compiler.is_compiling() else torch.arange(shape[0] + 1) * shape[1]
            return cls(shape, starts, on_host)
        if per_token.ndim != 1:
            raise ValueError(f"tokens must be [B, T] or packed [N], got {tuple(shape)}")
        if cu_seqlens is not None:
            cu_seqlens = torch.as_tensor(cu_seqlens).long()
            on_host = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()  # a graph cannot look
            if cu_seqlens.ndim != 1 or (on_host and not _is_partition(cu_seqlens, shape[0])):
                raise ValueError(f"cu_seqlens must rise from 0 to N={shape[0]}, got {cu_seqlens.tolist()}")
            return cls(shape, to_device(cu_seqlens, per_token), cu_seqlens if on_host else None)
        return cls(shape, None)

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


def to_device(value, like):
    """Without a wait for the device; a copy from pageable memory is staged before the call returns."""
    return value.to(like.device, non_blocking=True)


def per_token(value, name, shape):
    """Floats and None pass; a tensor must have the tokens' shape and comes back flat."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != shape:
        raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(value.shape)}")
    return value.reshape(-1)


def keep_rows(layout, objective, targets, advantages, *, mask, rows, old_logps, ref_logps, sampler_logps,
              token_weights, num_items_in_batch, temperature, compact=True):  # fmt: skip
    """Flatten everything, compute the weights over all rows, then drop the rows that carry no gradient: PolicyRows.

    How many those are, the host must learn from the device, unless the caller passes `rows`. compact=False spares that
    wait: the rows that carry gradient are moved to the front, the others follow with finite stand-ins.
    """
    ref_logps = ref_logps if objective.beta != 0 else None
    given = {"advantages": advantages, "mask": mask, "old_logps": old_logps, "ref_logps": ref_logps,
             "sampler_logps": sampler_logps, "token_weights": token_weights, "temperature": temperature}  # fmt: skip
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.device != targets.device:
            raise ValueError(f"{name} must be on {targets.device} like the tokens, got {value.device}")
    coupled = objective.couples_tokens(sampler_logps is not None)
    _check(layout, objective, advantages, old_logps, ref_logps, sampler_logps, token_weights, coupled)
    dtype = torch.float64 if advantages.dtype == torch.float64 else torch.float32
    total = layout.shape.numel()
    mask = per_token(mask, "mask", layout.shape)
    mask = torch.ones(total, dtype=torch.bool, device=targets.device) if mask is None else mask != 0
    if token_weights is None:
        weights = objective.token_weights(mask, layout.cu_seqlens, num_items_in_batch)
    else:
        weights = per_token(token_weights, "token_weights", layout.shape).masked_fill(~mask, 0)
    entropy_weights = None
    if objective.entropy_coef != 0:
        entropy_weights = objective.entropy_weights(mask, num_items_in_batch).to(dtype)
    advantages = layout.per_token(advantages, "advantages").to(dtype)
    active = lengths = host_lengths = None
    if rows is not None:
        index = None if len(rows) == total else to_device(rows, targets)
        host_lengths = _host_lengths(layout, rows, total) if coupled else None
    else:
        active = _active_rows(layout, objective, mask, weights, advantages, coupled)
        index = active.nonzero()[:, 0] if compact else torch.argsort(~active, stable=True)
        if compact and len(index) == total:
            index = None
    if coupled:
        lengths = layout.cu_seqlens.diff()
        if active is not None and index is not None:
            counts = torch.segment_reduce(active.float(), "sum", lengths=lengths, unsafe=True).long()
            lengths = counts if compact else torch.cat([counts, total - counts.sum(0, keepdim=True)])
        elif index is not None:
            lengths = torch.searchsorted(index, layout.cu_seqlens).diff()
    active = None if active is None or compact else active[index]

    def keep(value):
        if index is None or not isinstance(value, torch.Tensor):
            return value
        kept = value[index]
        return kept if active is None else torch.where(active, kept, 1 if value is temperature else 0)

    temperature = per_token(temperature, "temperature", layout.shape)
    return PolicyRows(
        index=index,
        targets=keep(targets.reshape(-1)),
        temperature=keep(temperature),
        advantages=keep(advantages),
        weights=keep(weights.to(dtype)),
        old_logps=keep(per_token(old_logps, "old_logps", layout.shape)),
        ref_logps=keep(per_token(ref_logps, "ref_logps", layout.shape)),
        lengths=lengths,
        sampler_logps=keep(per_token(sampler_logps, "sampler_logps", layout.shape)),
        entropy_weights=keep(entropy_weights),
        active=active,
        host_lengths=host_lengths,
    )


def _host_lengths(layout, rows, total):
    """Kept rows of each sequence as a tuple, where the host knows enough; else None."""
    bounds = layout.host_cu_seqlens
    if bounds is None or (len(rows) != total and rows.device.type != "cpu"):
        return None
    return tuple((bounds if len(rows) == total else torch.searchsorted(rows, bounds)).diff().tolist())


def _check(layout, objective, advantages, old_logps, ref_logps, sampler_logps, token_weights, coupled):
    if objective.beta != 0 and ref_logps is None:
        raise ValueError(f"beta={objective.beta} needs ref_logps; pass them, or beta=0")
    given = {"advantages": advantages, "old_logps": old_logps, "ref_logps": ref_logps, "sampler_logps": sampler_logps}
    for name, value in given.items():
        if value is not None and value.requires_grad:
            raise ValueError(f"{name} must not require grad: the loss differentiates by the policy alone; detach it")
    mode = objective.importance_sampling_mode
    if sampler_logps is not None and objective.surrogate == "vespo" and mode.startswith("sequence"):
        raise ValueError(
            "vespo folds the sampler's weights into its own sequence weight token by token: importance_sampling_mode "
            f"must be 'token_truncate' or 'token_mask' with sampler_logps, got {mode!r}"
        )
    if layout.cu_seqlens is None and (coupled or (objective.needs_sequences and token_weights is None)):
        by_sampler = f", importance_sampling_mode={mode!r}" if sampler_logps is not None else ""
        raise ValueError(
            f"cu_seqlens is needed by loss_type={objective.loss_type!r}, "
            f"importance_sampling_level={objective.importance_sampling_level!r}{by_sampler} in the packed layout"
        )


def _active_rows(layout, objective, mask, weights, advantages, coupled):
    """[N] bool, the rows that carry gradient: masked-in, weighted, and (at beta = 0) of nonzero advantage; with
    an entropy bonus all that are masked-in.
    """
    active = mask & (weights != 0)
    if objective.beta == 0:
        active &= advantages != 0
    if objective.entropy_coef != 0:
        active = mask
    if coupled:
        # A token of no weight still moves its sequence's factor: a sequence is kept or dropped as a whole.
        lengths = layout.cu_seqlens.diff()
        any_active = torch.segment_reduce(active.float(), "max", lengths=lengths, initial=0, unsafe=True) > 0
        active = mask & any_active.repeat_interleave(lengths, output_size=len(mask))
    return active
