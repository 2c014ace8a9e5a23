"""The loss as a library: advantages, objectives, and the losses. It needs torch and triton, and nothing else.

Other modules import these names from here. losses.py has the losses, and says where each of them is computed, tested
and timed. logprobs.py has the log-probs, objective.py the knobs, and advantage.py turns rewards into advantages. A name
is loaded on first use, so that the settings can read the names of the objectives without loading the kernels.
"""

import importlib
from typing import Any

_HOME = {
    "decoupled_advantages": "advantage",
    "group_advantages": "advantage",
    "Objective": "objective",
    "GRPOLossOutput": "output",
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
