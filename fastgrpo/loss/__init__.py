"""The loss as a library: advantages, objectives, and the losses. It needs only torch and Triton.

Other modules import these names from here. Each is loaded on first use, so that the settings can read the names of the
objectives without loading the kernels.
"""

import importlib
from typing import Any

_HOME = {
    "decoupled_advantages": "advantages",
    "group_advantages": "advantages",
    "Objective": "objective",
    "GRPOLossOutput": "losses",
    "grpo_loss": "losses",
    "linear_grpo_loss": "losses",
    "logits_grpo_loss": "losses",
    "linear_logprob": "logprobs",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fastgrpo.loss' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fastgrpo.loss.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
