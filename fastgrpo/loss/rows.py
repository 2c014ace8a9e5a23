"""Turns the tensors that a caller passes into the rows that the kernels compute: layout, weights, and kept rows.

Shapes: N tokens, B prompts or sequences, T padded length, S sequences, M kept rows. A row is one token's row of the
hidden states or logits; it is kept where it is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastgrpo.kernels.objectives import PolicyRows
from fastgrpo.loss.inputs import TokenInputs, check_kept, check_whole
from fastgrpo.loss.objective import Objective
from fastgrpo.loss.staging import to_device
from fastgrpo.loss.values import check_numbers, check_tensor


@dataclass(frozen=True)
class Layout:
    """Where sequences lie among the N tokens.

    Attributes:
        shape: Shape of per-token tensors, [B, T] or [N].
        cu_seqlens: [S+1] int64 on the device: where each sequence starts, and the end of the last. None where the
            packed layout came without them.
        host_cu_seqlens: The same on the host, where it is known there.
    """

    shape: torch.Size
    cu_seqlens: torch.Tensor | None
    host_cu_seqlens: torch.Tensor | None = None

    @classmethod
    def of(cls, per_token: torch.Tensor, cu_seqlens: torch.Tensor | Sequence[int] | None) -> "Layout":
        """Read the layout off a per-token tensor.

        Args:
            per_token: [B, T], or packed [N].
            cu_seqlens: [S+1] integers of the packed layout, or None.
        """
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
            try:
                cu_seqlens = torch.as_tensor(cu_seqlens)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"cu_seqlens must be a tensor or a list of [S+1] integers: {error}") from None
            check_tensor(cu_seqlens, "cu_seqlens", "integers")
            if cu_seqlens.ndim != 1 or not len(cu_seqlens):
                raise ValueError(f"cu_seqlens must be [S+1], got shape {tuple(cu_seqlens.shape)}")
            cu_seqlens = cu_seqlens.long()
            rule = f"rise from 0 to N={shape[0]}"
            check_numbers(cu_seqlens, "cu_seqlens", rule, lambda starts: _partitions(starts, shape[0]))
            on_host = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()  # a graph cannot look
            return cls(shape, to_device(cu_seqlens, per_token.device), cu_seqlens if on_host else None)
        return cls(shape, None)

    def per_token(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """Spread a value over the tokens.

        Args:
            value: [S], one value a sequence; or [B, T] or [N], one a token.
            name: What the value is called in the error.

        Returns:
            [N].

        Raises:
            ValueError: The shape is neither of them.
        """
        if value.shape == self.shape:
            return value.reshape(-1)
        if self.cu_seqlens is not None and value.shape == (len(self.cu_seqlens) - 1,):
            return value.repeat_interleave(self.cu_seqlens.diff(), output_size=self.shape.numel())
        hint = "" if self.cu_seqlens is not None else " (one value per sequence needs cu_seqlens)"
        raise ValueError(
            f"{name} must be per token {tuple(self.shape)} or per sequence, got {tuple(value.shape)}{hint}"
        )


def _partitions(starts, total):
    """Tell for each start [S+1] whether it is legal: the first is 0, none is below the one before, the last is N."""
    low = torch.cat([starts.new_zeros(1), starts[:-1]])
    high = torch.cat([starts[1:], starts.new_full((1,), total)])
    legal = (starts >= low) & (starts <= high)
    legal[0] &= starts[0] == 0
    legal[-1] &= starts[-1] == total
    return legal


def per_token(value: float | torch.Tensor | None, name: str, shape: torch.Size) -> float | torch.Tensor | None:
    """Flatten a per-token tensor. Floats and None pass.

    Args:
        value: A float, None, or a tensor in the tokens' shape.
        name: What the value is called in the error.
        shape: The tokens' shape.

    Returns:
        The value, [N] where it is a tensor.

    Raises:
        ValueError: The tensor has another shape.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != shape:
        raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(value.shape)}")
    return value.reshape(-1)


def keep_rows(
    inputs: TokenInputs, objective: Objective, compact: bool = True, dtype: torch.dtype = torch.float32
) -> PolicyRows:
    """Compute the weights over all tokens, then drop the rows that carry no gradient.

    Unless the caller gives `inputs.rows`, the host must ask the device how many rows carry gradient.

    Args:
        inputs: What the caller of the loss gave.
        objective: The objective of the loss.
        compact: Whether the host may wait for that answer. If not, the rows that carry gradient are moved to the front,
            and the others follow them with finite values in place of their own.
        dtype: Dtype in which the log-probs are computed, fp32 or fp64. Weights and advantages get it too, or fp64 for
            fp64 advantages.

    Raises:
        ValueError: An input is refused, by itself or because of its shape or of a number in an active row; or something
            that the objective needs is not given.
    """
    if objective.beta == 0:
        inputs = inputs._replace(ref_logps=None)
    inputs.check()
    layout = Layout.of(inputs.targets, inputs.cu_seqlens)
    targets, rows = inputs.targets, None if inputs.rows is None else inputs.rows.long()
    coupled = objective.couples_tokens(inputs.sampler_logps is not None)
    _check(layout, objective, inputs, coupled)
    dtype = torch.float64 if torch.float64 in (dtype, inputs.advantages.dtype) else torch.float32
    total = layout.shape.numel()
    mask = per_token(inputs.mask, "mask", layout.shape)
    mask = torch.ones(total, dtype=torch.bool, device=targets.device) if mask is None else mask != 0
    if inputs.token_weights is None:
        weights = objective.token_weights(mask, layout.cu_seqlens, inputs.num_items_in_batch, dtype)
    else:
        weights = per_token(inputs.token_weights, "token_weights", layout.shape).masked_fill(~mask, 0)
    entropy_weights = None
    if objective.entropy_coef != 0:
        entropy_weights = per_token(inputs.entropy_weights, "entropy_weights", layout.shape)
        if entropy_weights is None:
            entropy_weights = objective.entropy_weights(mask, inputs.num_items_in_batch, dtype)
        else:
            entropy_weights = objective.entropy_coef * entropy_weights.to(dtype).masked_fill(~mask, 0)
    advantages = layout.per_token(inputs.advantages, "advantages").to(dtype)
    active = host_lengths = None
    if rows is not None:
        index = None if len(rows) == total else to_device(rows, targets.device)
        if coupled and (index is not None or inputs.mask is not None):
            check_whole(rows, mask, layout.cu_seqlens)
        host_lengths = _host_lengths(layout, rows, total) if coupled else None
    else:
        active = _active_rows(layout, objective, mask, weights, advantages, coupled)
        index = active.nonzero()[:, 0] if compact else torch.argsort(~active, stable=True)
        if compact and len(index) == total:
            index = None
    lengths = _kept_lengths(layout, index, active, compact) if coupled else None
    active = None if active is None or compact else active[index]

    def keep(value, stand_in=0):
        if index is None or not isinstance(value, torch.Tensor):
            return value
        kept = value[index]
        return kept if active is None else torch.where(active, kept, stand_in)

    def keep_input(name, stand_in=0):
        return keep(per_token(getattr(inputs, name), name, layout.shape), stand_in)

    kept = PolicyRows(
        index=index,
        targets=keep(targets.reshape(-1)),
        temperature=keep_input("temperature", stand_in=1),
        advantages=keep(advantages),
        weights=keep(weights.to(dtype)),
        old_logps=keep_input("old_logps"),
        ref_logps=keep_input("ref_logps"),
        lengths=lengths,
        sampler_logps=keep_input("sampler_logps"),
        entropy_weights=keep(entropy_weights),
        active=active,
        host_lengths=host_lengths,
    )
    check_kept(kept)
    return kept


def _kept_lengths(layout, index, active, compact):
    """Count the kept rows of each sequence, [S]; with the moved rows that are not active behind them, [S+1]."""
    lengths = layout.cu_seqlens.diff()
    if index is None:
        return lengths
    if active is None:
        return torch.searchsorted(index, layout.cu_seqlens).diff()
    counts = torch.segment_reduce(active.float(), "sum", lengths=lengths, unsafe=True).long()
    return counts if compact else torch.cat([counts, len(active) - counts.sum(0, keepdim=True)])


def _host_lengths(layout, rows, total):
    """Count the kept rows of each sequence on the host: a tuple, or None where the host does not know enough."""
    bounds = layout.host_cu_seqlens
    if bounds is None or (len(rows) != total and rows.device.type != "cpu"):
        return None
    return tuple((bounds if len(rows) == total else torch.searchsorted(rows, bounds)).diff().tolist())


def _check(layout, objective, inputs, coupled):
    """Raise a ValueError where the objective needs an input that is missing, or has no use for the entropy weights."""
    if objective.beta != 0 and not objective.full_kl and inputs.ref_logps is None:
        raise ValueError(f"beta={objective.beta} needs ref_logps; pass them, or beta=0")
    if inputs.entropy_weights is not None and objective.entropy_coef == 0:
        raise ValueError(
            f"entropy_weights needs an entropy_coef other than 0, got entropy_coef={objective.entropy_coef}; leave "
            "entropy_weights out where there is no bonus"
        )
    mode = objective.importance_sampling_mode
    if inputs.sampler_logps is not None:
        objective.check_sampler()
    if layout.cu_seqlens is None and (coupled or (objective.needs_sequences and inputs.token_weights is None)):
        by_sampler = f", importance_sampling_mode={mode!r}" if inputs.sampler_logps is not None else ""
        raise ValueError(
            f"cu_seqlens is needed by loss_type={objective.loss_type!r}, "
            f"importance_sampling_level={objective.importance_sampling_level!r}{by_sampler} in the packed layout"
        )


def _active_rows(layout, objective, mask, weights, advantages, coupled):
    """Find the rows that carry gradient, [N] bool: those in the mask that have a weight and, at beta = 0, an advantage.

    With an entropy bonus all rows in the mask carry gradient.
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
