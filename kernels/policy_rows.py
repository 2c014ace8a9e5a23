"""What a policy loss knows of each token that it computes, and how these tokens are cut into chunks.

Shapes: N tokens of the batch, M <= N kept tokens (those that are computed), S sequences. A kept token is one row of the
hidden states or logits, so that "row" below always means the row of one kept token.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


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
