"""Rollouts: prompts in, completions out, generated in the trainer's process with the policy's own weights.

Terms of the engine:

- A *prompt* is the token ids that a request asks to complete, n times. It is computed once for all n completions.
- A *lane* holds one completion in flight. Every decode step computes one token per lane. When a completion finishes,
  its lane is free for the next one.
- A *slot* is memory for keys and values. A prompt has one slot, which all its lanes read. Each lane has one slot for
  its drawn tokens.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from fastgrpo.config.sections import ROLLOUT_BACKENDS
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.backend import RolloutBackend


def make_backend(
    policy: Policy, config: Any, reserved: Callable[[], int] | None = None, enable_sleep_mode: bool = False
) -> RolloutBackend:
    """Create the backend named by `config.rollout_backend`.

    Args:
        policy: The policy to sample from.
        config: Settings with the fields of the engine's section.
        reserved: As for `RolloutEngine`.
        enable_sleep_mode: As for `RolloutEngine`.
    """
    name = config.rollout_backend
    if name == "auto":
        name = "hf" if policy.own_attention else "fast"
        config = dataclasses.replace(config, rollout_backend=name)
    module, _, name = ROLLOUT_BACKENDS[name].rpartition(".")
    own = {"enable_sleep_mode": True} if enable_sleep_mode else {}
    return getattr(importlib.import_module(module), name).from_config(policy, config, reserved, **own)
