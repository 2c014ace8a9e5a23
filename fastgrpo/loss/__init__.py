"""The loss alone: advantages, objectives, and the losses over the kernels. It needs torch and triton, nothing else.

Others import from here. losses.py, whose docstring says where each loss is computed, tested and timed, has the losses;
logprobs.py the log-probs; objective.py their knobs; advantage.py turns rewards into advantages.
"""

from fastgrpo.loss.advantage import decoupled_advantages, group_advantages
from fastgrpo.loss.logprobs import linear_logprob
from fastgrpo.loss.losses import grpo_loss, linear_grpo_loss, logits_grpo_loss
from fastgrpo.loss.objective import Objective
from fastgrpo.loss.output import GRPOLossOutput

__all__ = [
    "GRPOLossOutput",
    "Objective",
    "decoupled_advantages",
    "group_advantages",
    "grpo_loss",
    "linear_grpo_loss",
    "linear_logprob",
    "logits_grpo_loss",
]
