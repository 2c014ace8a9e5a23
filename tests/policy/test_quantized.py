"""A policy of 4-bit weights with adapters (QLoRA): its products, its rollouts, and the files of its training."""

import pytest
import tiny
import torch
from peft import LoraConfig
from runs import lines, make_trainer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PhimoeConfig, PhimoeForCausalLM

from fastgrpo.policy.load import load_policy
from fastgrpo.policy.lora import base_weights
from fastgrpo.policy.quantized import NF4Linear, quantize
from fastgrpo.rollout import weights
from fastgrpo.rollout.graph import Graphs
from fastgrpo.rollout.layers import groups

pytest.importorskip("bitsandbytes", reason="not installed (extra: quantization)")
pytestmark = pytest.mark.usefixtures("without_curves")
IDS = torch.tensor([[5, 9, 2, 33, 17, 8, 60]])


def test_a_product_is_that_of_the_dequantized_weight_and_keeps_none_for_its_gradient():
    layer, kept = NF4Linear(torch.nn.Linear(128, 24), "cpu"), []
    states, gradient = torch.randn(5, 128, requires_grad=True), torch.randn(5, 24)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        found = layer(states)
    expected = layer.dense(torch.nn.Parameter(layer.dequantized()))(states)
    assert torch.equal(found, expected) and not kept and layer.weight.nbytes == 128 * 24 * 9 // 16
    torch.testing.assert_close(*(torch.autograd.grad(product, states, gradient) for product in (found, expected)))
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=1))
    for model, problem in ((tiny.model(), r"q_proj has 32 inputs.*multiple of 64"), (gpt2, "no torch.nn.Linear")):
        with pytest.raises(ValueError, match=problem):
            quantize(model, "nf4", "cpu")
    phimoe = PhimoeForCausalLM(PhimoeConfig(**tiny.SHAPE | {"hidden_size": 64}, num_local_experts=2))
    assert quantize(phimoe, "nf4", "cpu")(IDS).logits.isfinite().all()  # its router, a subclass of Linear, stays


def test_adapters_learn_on_weights_that_stay_and_every_file_gives_the_trained_policy(tmp_path, monkeypatch):
    path, run = str(tiny.save(tmp_path / "model", hidden_size=64)), tmp_path / "run"
    with pytest.raises(ValueError, match=r"load_in_4bit .* --use_peft"):
        make_trainer(tmp_path, len, model=path, load_in_4bit=True)
    adapters = LoraConfig(r=4, target_modules="all-linear")
    trainer = make_trainer(
        tmp_path, lambda completions, **_: [len(set(text)) for text in completions], model=path, learning_rate=2e-2,
        beta=0.1, max_completion_length=20, gradient_checkpointing=True, load_in_4bit=True, peft_config=adapters,
    )  # fmt: skip
    planned = next(part.bytes for part in trainer.plan.parts if part.name == "policy")
    assert planned == sum(parameter.nbytes for parameter in trainer.policy.parameters())
    before = {name: value.clone() for name, value in base_weights(trainer.model).items()}
    trainer.train()
    rows = [row for row in lines(run) if "kl" in row]
    assert max(row["sampler/logp_gap_mean"] for row in rows) < 1e-5 and rows[-1]["kl"] > 1e-4
    assert all(torch.equal(value, before[name]) for name, value in base_weights(trainer.model).items())
    logits = trainer.model(IDS).logits
    again, _ = load_policy(run / "checkpoint-2", device="cpu", load_in_4bit=True)
    assert torch.equal(again.module(IDS).logits, logits)
    whole = AutoModelForCausalLM.from_pretrained(run / "merged")
    torch.testing.assert_close(whole(IDS).logits, logits, atol=1e-4, rtol=1e-4)

    monkeypatch.setattr(weights, "uses_kernels", lambda policy: True)  # a GPU copies the weights, or dequantizes them
    states, linears = torch.randn(3, 64), groups(trainer.policy)[0]
    for free, copies in ((1e9, 8), (0, 0)):
        held = weights.HeldWeights(trainer.policy, Graphs(IDS.device, enabled=False), lambda free=free: free)
        held.hold(1)
        assert len(held.copies) == copies
        found, expected = held.layers.layers[0].qkv(states), torch.cat([linear(states) for linear in linears], 1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
