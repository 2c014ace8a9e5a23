"""The knobs of a policy-gradient objective: bounds of the ratios, regularization, and weights of the tokens.

    loss = sum_n w_n (I_n s_n + beta KL_n) - entropy_coef sum_n e_n H_n

s_n is the surrogate of a token. Its weight w_n is the whole aggregation. I_n is the importance weight against the
sampler (1 without `sampler_logps`), and e_n = 1 / tokens of the step. A loss type is one surrogate and one aggregation:
see `LOSS_TYPES` in kernels/objectives.py. docs/objectives.md has their formulas and papers.
"""

import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fastgrpo.kernels.objectives import DIVISORS, LOSS_TYPES

IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
KL_KINDS = ("k1", "k2", "k3", "abs", "full")  # estimators from the drawn tokens, and the sum over the vocabulary
IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class Interval(NamedTuple):
    """A range of finite numbers; `above` and `below` are exclusive bounds. `why` is appended to the error message."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf
    why: str = ""

    @property
    def text(self) -> str:
        """The range in words, to follow "must be"."""
        if self.at_most == self.below == math.inf:
            return "positive" if self.above == 0 else f"at least {self.at_least}"
        low = f"[{self.at_least}" if self.above == -math.inf else f"({self.above}"
        return f"in {low}, {self.at_most}]" if self.below == math.inf else f"in {low}, {self.below})"

    def check(self, name: str, value: float) -> None:
        """Raise a ValueError unless the value is a number in the range. Under torch.compile nothing is checked."""
        if torch.compiler.is_compiling():
            return
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
        if not (self.at_least <= value <= self.at_most and self.above < value < self.below):
            raise ValueError(f"{name} must be {self.text}, got {value}" + (f": {self.why}" if self.why else ""))


POSITIVE, NOT_NEGATIVE = Interval(above=0), Interval(at_least=0)
# Logits up to 1e8 stay finite in fp32 if divided by a temperature of at least this size.
TEMPERATURE = Interval(at_least=1e-30, why="logits are divided by it")
# The range of each numeric knob, and of the setting with the same name.
RANGES = {
    "epsilon": NOT_NEGATIVE,
    "epsilon_high": NOT_NEGATIVE,
    "delta": POSITIVE,
    "beta": NOT_NEGATIVE,
    "max_completion_length": Interval(at_least=1),
    "entropy_coef": Interval(),
    "sapo_temperature_pos": POSITIVE,
    "sapo_temperature_neg": POSITIVE,
    "vespo_k_pos": NOT_NEGATIVE,
    "vespo_lambda_pos": POSITIVE,
    "vespo_k_neg": NOT_NEGATIVE,
    "vespo_lambda_neg": POSITIVE,
    "importance_sampling_clip_max": POSITIVE,
    "importance_sampling_clip_min": NOT_NEGATIVE,
}
OPTIONAL = (
    "epsilon_high", "delta", "max_completion_length", "importance_sampling_clip_max", "importance_sampling_clip_min"
)  # fmt: skip


@dataclass(frozen=True)
class Objective:
    """The knobs of the loss, under TRL's names. The constructor raises ValueError for invalid ones.

    Attributes:
        loss_type: Surrogate and aggregation, a key of `LOSS_TYPES`.
        importance_sampling_level: Level of the ratio: "token", or "sequence" for the geometric mean over the sequence
            (GSPO, arXiv 2507.18071 eq. 7).
        epsilon: The ratio is clipped to at least 1 - epsilon.
        epsilon_high: The ratio is clipped to at most 1 + epsilon_high; None is epsilon. For cispo it is the cap on the
            ratio itself (5.0 in arXiv 2510.13786).
        delta: Upper bound on the unclipped ratio (two-sided clip, arXiv 2505.07291 eq. 2), or None.
        beta: Coefficient of the KL to the reference. 0 needs no reference.
        kl: KL of a token. The estimators, with d = ref_logp - logp: "k1" is -d, "k2" is d^2/2, "k3" is e^d - d - 1,
            "abs" is |d|. "full" is the KL of the full distributions, sum_v pi_v (log pi_v - log ref_v).
        max_completion_length: Constant length in tokens that dr_grpo divides by.
        use_bias_correction_kl: Multiply the KL by the ratio, with gradient through both factors (arXiv 2512.02556).
        entropy_coef: Coefficient of the entropy bonus: the mean entropy over the tokens of the step, subtracted from
            the loss.
        sapo_temperature_pos: Temperature tau of SAPO's gate for tokens with a positive advantage.
        sapo_temperature_neg: Temperature tau of SAPO's gate for all other tokens.
        vespo_k_pos: k of VESPO's phi(W) = exp(lambda + k log W - lambda W) for tokens with advantage >= 0.
        vespo_lambda_pos: lambda of VESPO's phi for tokens with advantage >= 0.
        vespo_k_neg: k of VESPO's phi for tokens with a negative advantage.
        vespo_lambda_neg: lambda of VESPO's phi for tokens with a negative advantage.
        importance_sampling_mode: How I = exp(old - sampler) weights the surrogate, if `sampler_logps` are given. I is
            per token ("token_") or per sequence ("sequence_"). Outside its bounds it is clamped ("truncate") or set
            to 0 ("mask").
        importance_sampling_clip_max: Upper bound of I; None is unbounded.
        importance_sampling_clip_min: Lower bound of I; None is unbounded.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    kl: str = "k3"
    max_completion_length: int | None = None
    use_bias_correction_kl: bool = False
    entropy_coef: float = 0.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_mode: str = "sequence_mask"
    importance_sampling_clip_max: float | None = 3.0
    importance_sampling_clip_min: float | None = None

    def __post_init__(self):
        for name, choices in (
            ("loss_type", LOSS_TYPES),
            ("importance_sampling_level", IMPORTANCE_SAMPLING_LEVELS),
            ("kl", KL_KINDS),
            ("importance_sampling_mode", IMPORTANCE_SAMPLING_MODES),
        ):
            if getattr(self, name) not in tuple(choices):
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, interval in RANGES.items():
            if getattr(self, name) is not None or name not in OPTIONAL:
                interval.check(name, getattr(self, name))
        self._check_combinations()

    def _check_combinations(self):
        loss, level = self.loss_type, self.importance_sampling_level
        low, high = self.importance_bounds
        for wrong, message in (
            (
                loss == "dr_grpo" and self.max_completion_length is None,
                "dr_grpo needs max_completion_length, the constant length it divides by, got None",
            ),
            (
                loss == "vespo" and level != "token",
                f"vespo already weights whole sequences; it needs importance_sampling_level='token', got {level!r}",
            ),
            (
                self.delta is not None and self.surrogate != "clip",
                f"delta applies to clipped losses, and {loss} does not clip; pass delta=None",
            ),
            (
                self.use_bias_correction_kl and self.kl == "full",
                "use_bias_correction_kl applies to a KL estimated from drawn tokens, and kl='full' is exact; remove "
                "one of them",
            ),
            (not low < high, f"importance_sampling_clip_min must be in [0, clip_max={high}), got {low}"),
        ):
            if wrong:
                raise ValueError(message)

    def check_sampler(self) -> None:
        """Raise a ValueError if the surrogate does not support this importance_sampling_mode."""
        if self.surrogate == "vespo" and self.importance_sampling_mode.startswith("sequence"):
            raise ValueError(
                "vespo multiplies its sequence weight by each token's importance weight: with sampler_logps, "
                "importance_sampling_mode must be 'token_truncate' or 'token_mask', got "
                f"{self.importance_sampling_mode!r}"
            )

    @property
    def full_kl(self) -> bool:
        """Whether the loss has the KL of the full distributions, which needs the reference's states and head."""
        return self.beta != 0 and self.kl == "full"

    @classmethod
    def of(cls, objective: "Objective | None", knobs: dict[str, Any]) -> "Objective":
        """Return the given objective, or build one from the knobs."""
        if objective is not None and knobs:
            raise ValueError(f"{', '.join(knobs)} are fields of objective; pass either them or objective, not both")
        return cls(**knobs) if objective is None else objective

    @property
    def surrogate(self) -> str:
        """Name of the per-token function in kernels/objectives.py."""
        return LOSS_TYPES[self.loss_type][0]

    @property
    def clip_high(self) -> float:
        """epsilon_high, or epsilon if it is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """The bounds (low, high) of the ratio in the surrogate; (0, inf) if it has none."""
        if self.surrogate == "clip":
            return 1 - self.epsilon, 1 + self.clip_high
        return 0.0, self.clip_high if self.surrogate == "cispo" else math.inf

    @property
    def importance_bounds(self) -> tuple[float, float]:
        """The bounds (low, high) of the importance weight against the sampler."""
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        return 0.0 if low is None else low, math.inf if high is None else high

    def couples_tokens(self, with_sampler: bool = False) -> bool:
        """Return whether the loss of a token depends on the other tokens of its sequence. Never split such sequences.

        True for sequence-level ratios, for vespo, and, `with_sampler`, for sequence-level importance weights.
        """
        by_sampler = with_sampler and self.importance_sampling_mode.startswith("sequence")
        return self.importance_sampling_level == "sequence" or self.surrogate == "vespo" or by_sampler

    @property
    def needs_sequences(self) -> bool:
        """Whether the loss, without sampler_logps, needs the boundaries of the sequences."""
        return LOSS_TYPES[self.loss_type][1].startswith("sequence") or self.couples_tokens()

    def token_weights(
        self, mask: torch.Tensor, cu_seqlens: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None, dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:  # fmt: skip
        """Compute w_n, the weight of each token.

        Args:
            mask: [B, T] or [N] bool, the tokens that count.
            cu_seqlens: [S+1] int64, needed by grpo, sapo, luspo and dr_grpo for a mask [N].
            num_items_in_batch: Tokens of the whole step, read by dapo, cispo and vespo. None means mask.sum(). Values
                below 1 count as 1.
            dtype: dtype of the arithmetic and the weights, torch.float32 or torch.float64.

        Returns:
            The shape of the mask, in `dtype`, 0 where the mask is 0.
        """
        aggregation, flat = LOSS_TYPES[self.loss_type][1], mask.flatten()
        if mask.ndim == 2:
            cu_seqlens = torch.arange(len(mask) + 1, device=mask.device) * mask.shape[1]
        if cu_seqlens is None and aggregation.startswith("sequence"):
            raise ValueError(f"loss_type={self.loss_type!r} needs cu_seqlens, or a mask [B, T]")
        divisor = DIVISORS[aggregation](flat, dtype, cu_seqlens, num_items_in_batch, self.max_completion_length)
        return (flat.to(dtype) / divisor).view(mask.shape)

    def entropy_weights(
        self, mask: torch.Tensor, num_items_in_batch: int | torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:  # fmt: skip
        """Compute entropy_coef e_n, where e_n = 1 / tokens of the step for every loss type.

        The bonuses of micro-batches therefore add up to the bonus of the batch. For the arguments see `token_weights`.
        """
        return self.entropy_coef * mask.to(dtype) / DIVISORS["step_tokens"](mask, dtype, None, num_items_in_batch, None)
