"""Rollouts: prompts in, completions out, drawn in the trainer's process from the policy's own weights.

Three words, each for one thing:

- A *prompt* is the token ids that a request asks to complete, n times. It is computed once for all n completions.
- A *lane* is one completion in flight: its place in the batch that every decode step computes. When a completion
  finishes, its lane is free for the next one.
- A *slot* is where keys and values lie in memory: a prompt has one that all its lanes read, and each lane has one.
"""

import importlib
from collections.abc import Callable
from typing import Any

from fastgrpo.config.sections import ROLLOUT_BACKENDS
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.backend import RolloutBackend


def make_backend(policy: Policy, config: Any, reserved: Callable[[], int] | None = None) -> RolloutBackend:
    """Make the backend that the settings name.

    Args:
        policy: The policy that draws.
        config: Settings with the fields of the engine's section.
        reserved: How many of the device's free bytes others will take, as for `RolloutEngine`; None for none.

    Returns:
        The backend.
    """
    module, _, name = ROLLOUT_BACKENDS[config.rollout_backend].rpartition(".")
    return getattr(importlib.import_module(module), name).from_config(policy, config, reserved)
