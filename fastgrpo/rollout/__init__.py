"""Rollouts: prompts in, completions out, drawn in the trainer's process from the policy's own weights.

The engine uses three words, each for one thing:

- A *prompt* is the token ids that a request asks to complete, n times. It is computed once for all n completions.
- A *lane* holds one completion in flight. Every decode step computes one token for each lane. When a completion
  finishes, its lane is free for the next one.
- A *slot* is the memory for keys and values. A prompt has one slot, which all its lanes read, and each lane has one for
  the tokens that it drew.
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
