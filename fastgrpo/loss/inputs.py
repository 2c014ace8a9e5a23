"""What a caller says about the tokens, and the checks of it. values.py tells when the host looks at numbers.

Shapes: N tokens, B prompts or sequences, T padded length, S sequences, M kept rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fastgrpo.kernels.objectives import PolicyRows
from fastgrpo.loss.objective import NOT_NEGATIVE
from fastgrpo.loss.values import (
    check_constant,
    check_number,
    check_numbers,
    check_temperature,
    check_temperatures,
    check_tensor,
)

# fields of TokenInputs that hold a number for each token or sequence -> their kind
KIND_OF = {
    "advantages": "real numbers",
    "mask": "real numbers or bools",
    "old_logps": "real numbers",
    "ref_logps": "real numbers",
    "sampler_logps": "real numbers",
    "token_weights": "real numbers or bools",
    "entropy_weights": "real numbers or bools",
}


class TokenInputs(NamedTuple):
    """What a caller of a loss says about the tokens. `linear_grpo_loss` documents each field where it is an argument.

    Attributes:
        targets: [B, T] or [N] token ids. `grpo_loss`, which reads none, gives its log-probs in their place.
        advantages: [B] or [B, T]; packed [S] or [N].
        mask: [B, T] or [N], positive where a token counts and 0 elsewhere, or None.
        cu_seqlens: [S+1] integers of the packed layout, or None.
        rows: [M] integers, the rows that carry gradient, or None.
        old_logps: [B, T] or [N], or None.
        ref_logps: [B, T] or [N], or None.
        sampler_logps: [B, T] or [N], or None.
        token_weights: [B, T] or [N], or None.
        num_items_in_batch: Tokens of the whole step, or None.
        temperature: A float, or [B, T] or [N].
        entropy_weights: [B, T] or [N], or None.
    """

    targets: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | Sequence[int] | None = None
    rows: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    sampler_logps: torch.Tensor | None = None
    token_weights: torch.Tensor | None = None
    num_items_in_batch: int | torch.Tensor | None = None
    temperature: float | torch.Tensor = 1.0
    entropy_weights: torch.Tensor | None = None

    def check(self) -> None:
        """Check each field by itself. `check_kept` looks at the numbers of the tokens that are used."""
        for name, kind in KIND_OF.items():
            value = getattr(self, name)
            if value is not None or name == "advantages":
                check_constant(value, name, kind, self.targets)
        if self.mask is not None and self.mask.dtype != torch.bool:
            check_numbers(self.mask, "mask", "be 0, or positive where a token counts", lambda mask: mask >= 0)
        if self.rows is not None:
            _check_rows(self.rows, self.targets)
        if self.num_items_in_batch is not None:
            _check_count(self.num_items_in_batch)
        check_temperature(self.temperature, self.targets)


def _check_rows(rows: Any, tokens: torch.Tensor) -> None:
    """Raise a ValueError where the rows [M] that a caller chose do not rise strictly within the N tokens."""
    if isinstance(rows, torch.Tensor) and rows.dtype == torch.bool:
        raise ValueError("rows must be indices, got a mask of bools; pass mask.flatten().nonzero().squeeze(1)")
    check_tensor(rows, "rows", "integers")
    if rows.ndim != 1:
        raise ValueError(f"rows must be [M], got shape {tuple(rows.shape)}")
    if rows.device not in (torch.device("cpu"), tokens.device):
        raise ValueError(f"rows must be on cpu, or on {tokens.device} like the tokens, got {rows.device}")
    total = tokens.numel()

    def legal(rows):
        before = torch.cat([rows.new_full((1,), -1), rows[:-1]])
        return (rows > before) & (rows < total)

    check_numbers(rows.long(), "rows", f"rise strictly within [0, {total})", legal)


def check_whole(rows: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """Check that rows hold all masked-in tokens of the sequences that they touch, and no others.

    An objective that looks at whole sequences would otherwise take a part of a sequence for the whole.

    Args:
        rows: [M] int64 indices, on the host or on the device of the tokens.
        mask: [N] bool.
        cu_seqlens: [S+1] int64 on the device of the tokens.
    """

    def legal(mask):
        chosen = torch.zeros_like(mask).index_fill_(0, rows.to(mask.device), True)
        lengths = cu_seqlens.diff()
        touched = torch.segment_reduce(chosen.float(), "max", lengths=lengths, initial=0, unsafe=True) > 0
        return chosen == (mask & touched.repeat_interleave(lengths, output_size=len(mask)))

    rule = "select the tokens in rows, and no others, of each sequence that the objective is to look at"
    check_numbers(mask, "mask", rule, legal)


def _check_count(count: Any) -> None:
    """Raise a ValueError where num_items_in_batch is not one finite number that is at least 0."""
    if isinstance(count, torch.Tensor):
        check_tensor(count, "num_items_in_batch", "real numbers")
        if count.numel() != 1:
            raise ValueError(f"num_items_in_batch must be one number, got shape {tuple(count.shape)}")
        rule = "be finite and at least 0"
        check_numbers(count, "num_items_in_batch", rule, lambda n: n.isfinite() & (n >= 0))
    else:
        check_number(count, "num_items_in_batch", NOT_NEGATIVE)


def check_kept(kept: PolicyRows) -> None:
    """Check the numbers of the kept rows. What other rows hold is never read.

    What models compute, the old and the reference's log-probs, may be NaN: the loss is NaN then, as it is where the
    policy's own log-probs are, and a trainer that skips such updates goes on.
    """
    for name, values in (("advantages", kept.advantages), ("token_weights", kept.weights)):
        check_numbers(values, name, "be finite on active rows", torch.isfinite, kept.index)
    if kept.sampler_logps is not None:
        rule = "be finite, or NaN where the sampler reported none, on active rows"
        check_numbers(kept.sampler_logps, "sampler_logps", rule, lambda logps: ~logps.isinf(), kept.index)
    if isinstance(kept.temperature, torch.Tensor):
        check_temperatures(kept.temperature, kept.index)
