"""Translations for TRL and Liger-Kernel, which differ from `Objective` in two points.

Their VESPO takes importance weights instead of log-probs of the sampler, and its lambda has a lower bound.

Shapes: B sequences, T tokens of each (padded).
"""

from collections.abc import Mapping
from typing import Any

import torch

from fastgrpo.kernels.objectives import LOG_RATIO_MAX, LOG_WEIGHT_MIN

Tensor = torch.Tensor
# Surrogate -> its own settings.
READ = {
    "clip": ("epsilon", "epsilon_high"),
    "cispo": ("epsilon_high",),
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
}
LAMBDA_MIN = 1e-4  # TRL and Liger hold vespo's lambda above it


def vespo_knobs(settings: Mapping[str, float]) -> dict[str, Any]:
    """Translate settings of VESPO into fields of `Objective`."""
    held = {name: max(value, LAMBDA_MIN) if "lambda" in name else value for name, value in settings.items()}
    return held | {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": None}


def shared_log_weights(ratio: Tensor, mask: Tensor) -> Tensor:
    """Distribute the log importance weight of each sequence equally over its tokens.

    VESPO uses only the product of the weights over the sequence, which does not change. `ratio` is [B, T], or [B, 1]
    for one weight per sequence, at least 0. Returns [B, 1], the log weight of each unmasked token.
    """
    total = ratio.log().clamp(LOG_WEIGHT_MIN, LOG_RATIO_MAX).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)
