"""Translations for TRL and Liger-Kernel, which differ from `Objective` in three points.

CISPO's cap can be below 1. VESPO gets importance weights against the sampler instead of log-probs. VESPO's lambda has a
lower bound.

Shapes: B sequences, T tokens of each (padded).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fastgrpo.kernels.objectives import LOG_RATIO_MAX, LOG_WEIGHT_MIN
from fastgrpo.loss.objective import Objective

Tensor = torch.Tensor
# The surrogate -> the settings that only some surrogates read, and this one does.
READ = {
    "clip": ("epsilon", "epsilon_high"),
    "cispo": ("epsilon_high",),
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
}
LAMBDA_MIN = 1e-4  # TRL and Liger hold vespo's lambda above it


def vespo_knobs(settings: Mapping[str, float]) -> dict[str, Any]:
    """Make fields of `Objective` of settings of VESPO."""
    held = {name: max(value, LAMBDA_MIN) if "lambda" in name else value for name, value in settings.items()}
    return held | {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": None}


def shared_log_weights(ratio: Tensor, mask: Tensor) -> Tensor:
    """Distribute the log importance weight of each sequence equally over its tokens.

    VESPO uses only the product of the weights over the sequence, which does not change.

    Args:
        ratio: [B, T], all of which count, or [B, 1] for one of the whole sequence; at least 0.
        mask: [B, T], 0 where a token does not count.

    Returns:
        [B, 1], what each token that counts gets.
    """
    total = ratio.log().clamp(LOG_WEIGHT_MIN, LOG_RATIO_MAX).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)


def cap_below_1(
    cap: float, objective: Objective, advantages: Tensor, old_logps: Tensor | None
) -> tuple[Objective, Tensor, Tensor | None]:
    """Translate a CISPO cap below 1 into a cap of 1, which `Objective` accepts.

    min(r, c) A = min(r / c, 1) c A, and where the KL is multiplied by the ratio, r KL = (r / c) c KL.

    Args:
        cap: c, positive and below 1.
        objective: That of CISPO with a cap of 1.
        advantages: A, of any shape.
        old_logps: [B, T], or None where the ratio is 1, so that min(r, c) is c.
    """
    if old_logps is None:
        return objective, cap * advantages, None
    if objective.use_bias_correction_kl:
        objective = replace(objective, beta=cap * objective.beta)
    return objective, cap * advantages, old_logps + math.log(cap)
