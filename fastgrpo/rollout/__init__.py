"""Rollouts: prompts in, completions out, generated in the trainer's process with the policy's own weights.

Terms of the engine:

- A *prompt* is the token ids that a request asks to complete, n times. It is computed once for all n completions.
- A *lane* holds one completion in flight. Every decode step computes one token per lane. When a completion finishes,
  its lane is free for the next one.
- A *slot* is memory for keys and values. A prompt has one slot, which all its lanes read. Each lane has one slot for
  its drawn tokens.
"""

from collections.abc import Callable
from typing import Any

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
    if name == "hf" or (name == "auto" and policy.own_attention):
        from fastgrpo.rollout.hf import HFBackend

        return HFBackend(policy, config.max_num_seqs)
    if name == "vllm":
        from fastgrpo.rollout.vllm import VLLMBackend

        backend = VLLMBackend(
            policy, config.max_num_seqs, base_urls=config.vllm_server_base_url, timeout=config.vllm_server_timeout,
            weights_dir=config.vllm_weights_dir, staleness_policy=getattr(config, "staleness_policy", "wait"),
        )  # fmt: skip
        backend.nccl &= not getattr(config, "max_staleness", 0)  # the weights may change while they are sent
        return backend
    from fastgrpo.rollout.engine import RolloutEngine

    return RolloutEngine(
        policy, max_num_seqs=config.max_num_seqs, memory_utilization=config.rollout_memory_utilization,
        enforce_eager=name == "eager", reserved=reserved, enable_sleep_mode=enable_sleep_mode,
    )  # fmt: skip
