"""Training of models with soft caps, sliding windows and experts."""

import dataclasses
import math

import pytest
import torch
from runs import make_trainer, samples_of
from torch.nn.utils.rnn import pad_sequence
from updates import before_each_step, rising

from benchmarks import architectures
from fastgrpo.data.records import Batch
from fastgrpo.policy.load import prepare

CASES = {
    # Both caps are low enough to bend scores of this size, and the window is shorter than the sequences.
    "gemma2": ("auto", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5, "sliding_window": 6}),
    "qwen3_moe": ("fast", {}),
    "cohere2": ("auto", {"logit_scale": 0.3}),
}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_next"])
def test_the_load_balancing_loss_is_that_of_the_model(name):
    policy, samples = prepare(architectures.tiny_model(name), own_attention=None), samples_of()
    samples = [dataclasses.replace(s, prompt_ids=samples[i // 3].prompt_ids) for i, s in enumerate(samples)]
    rows = [torch.tensor(s.prompt_ids + s.ids[:-1]) for s in samples]
    ids, mask = (pad_sequence(of, batch_first=True) for of in (rows, [torch.ones_like(row) for row in rows]))
    expected = policy.module(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    states, loss = policy.states_and_balance(batch := Batch.pack(samples, "cpu"))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert torch.equal(states, policy.completion_states(batch)) and len(batch.branches) == 2


def test_the_load_balancing_loss_trains_the_router(tmp_path):
    grads = {}
    for coef, checkpointing in ((0.0, True), (0.5, True), (0.5, False)):
        model = architectures.tiny_model("qwen3_moe", vocab_size=258)
        settings = {"router_aux_loss_coef": coef, "gradient_checkpointing": checkpointing}
        path = tmp_path / f"{coef}{checkpointing}"
        trainer = make_trainer(path, rising, model=model, max_tokens_per_microbatch=30, **settings)
        seen = before_each_step(trainer.updates, lambda m=model: m.model.layers[0].mlp.gate.weight.grad.clone())
        values = trainer.step()
        assert ("aux_loss" in values) == (coef > 0)
        grads[coef, checkpointing] = seen[0]
    torch.testing.assert_close(grads[0.5, True], grads[0.5, False])
    assert (grads[0.5, True] - grads[0.0, True]).abs().max() > 1e-4
    with pytest.raises(ValueError, match="Qwen2ForCausalLM returns no router"):
        make_trainer(tmp_path, router_aux_loss_coef=0.5)


@pytest.mark.parametrize("name", CASES)
def test_three_steps_train_every_architecture(tmp_path, name):
    backend, changes = CASES[name]
    model = architectures.tiny_model(name, vocab_size=258, **changes)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = {"rollout_backend": backend, "max_steps": 3, "max_completion_length": 12, "learning_rate": 1e-2}
    trainer = make_trainer(tmp_path, rising, model=model, beta=0.1, lr_scheduler_type="constant", **settings)
    for _ in range(3):
        values = trainer.step()
        assert values["sampler/logp_gap_mean"] < 1e-5
        assert math.isfinite(values["loss"]) and values["grad_norm"] > 0
    for weight, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[weight]), weight
    architectures.agrees(trainer.policy, trainer.engine)
