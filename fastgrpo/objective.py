"""One frozen record of a policy-gradient objective: what is clipped, against what, and how tokens are weighted.

The loss is sum_n w_n (surrogate_n + beta KL_n); the aggregation lives in the weights w_n alone:

| loss_type | w_n for a token of a sequence with len_s tokens | source |
|-----------|--------------------------------------------------|--------|
| grpo      | 1 / (S len_s): mean over sequences of the mean over tokens | arXiv 2402.03300 eq. 3 |
| bnpo      | 1 / tokens of this batch                         | TRL `loss_type="bnpo"` |
| dapo      | 1 / num_items_in_batch (tokens of the whole step) | arXiv 2503.14476 eq. 8 |
| dr_grpo   | 1 / (S max_completion_length)                    | arXiv 2503.20783 eq. 2 |
"""

import math
from dataclasses import dataclass

import torch

LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class Objective:
    """The knobs of the loss, under TRL's names; validated on construction.

    Args:
        loss_type: the aggregation, see the table above.
        importance_sampling_level: "token", or "sequence" for GSPO's geometric-mean ratio (arXiv 2507.18071 eq. 7).
        epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high]; epsilon_high None is epsilon.
        delta: upper bound on the unclipped ratio (two-sided clip, arXiv 2505.07291), or None.
        beta: coefficient of the KL to the reference; 0 needs no reference.
        kl: "k1" = -d, "k2" = d^2/2, "k3" = e^d - d - 1, with d = ref_logp - logp.
        max_completion_length: the constant of dr_grpo, in tokens.

    Raises:
        ValueError: naming the knob, its value and what is expected.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    kl: str = "k3"
    max_completion_length: int | None = None

    def __post_init__(self):
        for name, choices in (
            ("loss_type", LOSS_TYPES),
            ("importance_sampling_level", IMPORTANCE_SAMPLING_LEVELS),
            ("kl", KL_ESTIMATORS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.epsilon_high is None:
            object.__setattr__(self, "epsilon_high", self.epsilon)
        if not 0 <= self.epsilon < 1:
            raise ValueError(f"epsilon must be in [0, 1), got {self.epsilon}")
        if not 0 <= self.epsilon_high < math.inf:
            raise ValueError(f"epsilon_high must be at least 0 and finite, got {self.epsilon_high}")
        if self.delta is not None and not self.delta > 0:
            raise ValueError(f"delta must be positive, got {self.delta}")
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"beta must be at least 0 and finite, got {self.beta}")
        if self.loss_type == "dr_grpo" and not (self.max_completion_length or 0) > 0:
            raise ValueError(f"dr_grpo needs max_completion_length > 0, got {self.max_completion_length}")

    @property
    def needs_sequences(self):
        """Whether the objective looks at sequences, beyond the tokens."""
        return self.loss_type in ("grpo", "dr_grpo") or self.importance_sampling_level == "sequence"

    def token_weights(self, mask, cu_seqlens=None, num_items_in_batch=None):
        """w_n of the table above, 0 where the mask is.

        Args:
            mask: [N] bool, the tokens that count. cu_seqlens: [S+1] int64, needed by grpo and dr_grpo.
            num_items_in_batch: tokens of the whole step (int or tensor), read by dapo; None is mask.sum().

        Returns:
            [N] fp32.
        """
        if self.loss_type in ("bnpo", "dapo"):
            count = num_items_in_batch if self.loss_type == "dapo" else None
            count = mask.sum() if count is None else count
            count = torch.as_tensor(count, dtype=torch.float32, device=mask.device)
            return mask.float() / count.clamp(min=1)
        num_sequences = len(cu_seqlens) - 1
        if self.loss_type == "dr_grpo":
            return mask.float() / (num_sequences * self.max_completion_length)
        kept = torch.segment_reduce(mask.float(), "sum", lengths=cu_seqlens.diff())
        return mask.float() / (num_sequences * kept.clamp(min=1)).repeat_interleave(
            cu_seqlens.diff(), output_size=len(mask)
        )
