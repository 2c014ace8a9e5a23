"""Rollouts: prompts in, completions out, drawn in the trainer's process from the policy's own weights.

Three words, each for one thing:

- A *prompt* is the token ids that a request asks to complete, n times. It is computed once for all n completions.
- A *lane* is one completion in flight: its place in the batch that every decode step computes. When a completion
  finishes, its lane is free for the next one.
- A *slot* is where keys and values lie in memory: a prompt has one that all its lanes read, and each lane has one.
"""

from collections.abc import Callable
from typing import Any

from fastgrpo.policy.model import Policy
from fastgrpo.rollout.backend import RolloutBackend


def make_backend(policy: Policy, config: Any, reserved: Callable[[], int] | None = None) -> RolloutBackend:
    """Make the backend that the settings name.

    Args:
        policy: The policy that draws.
        config: Settings with the fields of the engine's section.
        reserved: See `RolloutEngine`.

    Returns:
        The backend.
    """
    if config.rollout_backend == "hf":
        from fastgrpo.rollout.hf import HFBackend

        return HFBackend(policy, config.max_num_seqs)
    from fastgrpo.rollout.engine import RolloutEngine

    return RolloutEngine(
        policy,
        max_num_seqs=config.max_num_seqs,
        attention=config.rollout_attention,
        memory_utilization=config.rollout_memory_utilization,
        enforce_eager=config.rollout_enforce_eager,
        reserved=reserved,
    )
