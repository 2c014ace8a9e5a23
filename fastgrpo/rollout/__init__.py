"""Generation inside the trainer's process, from the policy's own weights."""


def make_backend(model, config, reserved=None):
    """The backend that a `GRPOConfig` names. reserved: see `RolloutEngine`."""
    if config.rollout_backend == "hf":
        from fastgrpo.rollout.hf import HFBackend

        return HFBackend(model, max_num_seqs=config.max_num_seqs)
    from fastgrpo.rollout.engine import RolloutEngine

    return RolloutEngine(
        model,
        max_num_seqs=config.max_num_seqs,
        attention=config.rollout_attention,
        memory_utilization=config.rollout_memory_utilization,
        enforce_eager=config.rollout_enforce_eager,
        reserved=reserved,
    )
