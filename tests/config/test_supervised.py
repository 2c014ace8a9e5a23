"""The settings of supervised training."""

import pytest

from fastgrpo import GRPOConfig, SFTConfig


def test_what_a_trainer_asks_of_its_settings():
    config = SFTConfig(batch_size=3, use_peft=True)
    assert (config.command, config.rows_per_step, config.updates_per_step) == ("sft", 3, 1)
    assert (config.folder_name, config.keeps_first_weights, config.learning_rate) == ("arithmetic-sft", True, 2e-5)
    grpo = GRPOConfig(prompts_per_step=3, num_iterations=2, updates_per_rollout=3, beta=0.1)
    assert (grpo.command, grpo.rows_per_step, grpo.updates_per_step) == ("train", 3, 6)
    assert (grpo.folder_name, grpo.keeps_first_weights) == ("arithmetic", True)
    assert not GRPOConfig(beta=0.1, sync_ref_model=True).keeps_first_weights and not SFTConfig().keeps_first_weights


@pytest.mark.parametrize("name", ["beta", "num_iterations", "temperature", "reward_weights"])
def test_settings_of_grpo_are_unknown(name):
    with pytest.raises(TypeError, match=f"SFTConfig: unknown setting '{name}'"):
        SFTConfig(**{name: 1})


def test_bounds_hold():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        SFTConfig(batch_size=0)
    with pytest.raises(ValueError, match="max_steps must be positive"):
        SFTConfig(max_steps=0)
