"""fastgrpo: Group Relative Policy Optimization (https://arxiv.org/abs/2402.03300) on fused kernels.

Public names are loaded on first use, so the import is fast. The loss needs only torch and Triton; the trainer and the
engine need the packages of `pip install fastgrpo[train]`.
"""

import importlib
from pathlib import Path
from typing import Any

from fastgrpo._version import __version__

# The kernels are beside this package in a clone, and inside it in a wheel; `fastgrpo.kernels` finds both. A top-level
# package `kernels` would shadow Hugging Face's package of that name, which transformers imports.
if not (Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

_HOME = {
    "decoupled_advantages": "loss.advantages",
    "group_advantages": "loss.advantages",
    "Objective": "loss.objective",
    "GRPOLossOutput": "loss.losses",
    "grpo_loss": "loss.losses",
    "linear_grpo_loss": "loss.losses",
    "linear_logprob": "loss.logprobs",
    "logits_grpo_loss": "loss.losses",
    "GRPOConfig": "config.settings",
    "GRPOTrainer": "trainer",
    "SFTConfig": "config.settings",
    "SFTTrainer": "trainer",
    "RolloutEngine": "rollout.engine",
    "SamplingParams": "rollout.sampling",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fastgrpo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fastgrpo.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
