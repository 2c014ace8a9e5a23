"""Training of models with soft caps, sliding windows and experts."""

import math

import pytest
import torch
from runs import make_trainer
from updates import rising

from benchmarks import architectures

CASES = {
    # Both caps are low enough to bend scores of this size, and the window is shorter than the sequences.
    "gemma2": ("auto", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5, "sliding_window": 6}),
    "qwen3_moe": ("fast", {}),
    "cohere2": ("auto", {"logit_scale": 0.3}),
}


@pytest.mark.parametrize("name", CASES)
def test_three_steps(tmp_path, name):
    backend, changes = CASES[name]
    model = architectures.tiny_model(name, vocab_size=258, **changes)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = {"rollout_backend": backend, "max_steps": 3, "max_completion_length": 12, "learning_rate": 1e-2}
    trainer = make_trainer(tmp_path, rising, model=model, beta=0.1, lr_scheduler_type="constant", **settings)
    for _ in range(3):
        values = trainer.step()
        assert values["rollout/logp_gap"] < 1e-5
        assert math.isfinite(values["loss"]) and values["grad_norm"] > 0
    for weight, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[weight]), weight
    architectures.agrees(trainer.policy, trainer.engine)
