"""The loss alone: advantages, objectives, and the losses over the kernels. It needs torch and triton, nothing else.

Others import from here. losses.py, whose docstring says where each loss is computed, tested and timed, has the losses;
logprobs.py the log-probs; objective.py their knobs; advantage.py turns rewards into advantages. A name is loaded on
first use: the settings read the names of the objectives, and need not wait for the kernels.
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
