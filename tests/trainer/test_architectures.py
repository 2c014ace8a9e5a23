"""Architectures of which rollouts and training use parts that others have not: soft caps and windows, experts."""

import math

import pytest
import tiny
import torch

from benchmarks import architectures
from fastgrpo import GRPOConfig, GRPOTrainer

CASES = {
    # Both caps are low enough to bend scores of this size, and the window is shorter than the sequences.
    "gemma2": ("hf", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5, "sliding_window": 6}),
    "qwen3_moe": ("fast", {}),
}


def reward(completions, **_):
    return [float(len(set(text))) for text in completions]


@pytest.mark.parametrize("name", CASES)
def test_three_steps(tmp_path, name):
    backend, changes = CASES[name]
    model = architectures.tiny_model(name, vocab_size=258, **changes)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = GRPOConfig(
        output_dir=str(tmp_path / "run"), rollout_backend=backend, max_steps=3, prompts_per_step=2, num_generations=4,
        max_completion_length=12, learning_rate=1e-2, lr_scheduler_type="constant", beta=0.1, device="cpu",
    )  # fmt: skip
    rows = [{"prompt": "hello "}, {"prompt": "abc"}]
    trainer = GRPOTrainer(model, reward, settings, rows, processing_class=tiny.tokenizer())
    for _ in range(3):
        values = trainer.step()
        assert values["rollout/logp_gap"] < 1e-5
        assert math.isfinite(values["loss"]) and values["grad_norm"] > 0
    for weight, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[weight]), weight
    architectures.agrees(trainer.policy, trainer.engine)
