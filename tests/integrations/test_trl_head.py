"""The forward that TRL's trainer calls: log-probs and entropies of its own, for every head that it has."""

import dataclasses

import pytest
import tiny
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from trl.trainer.utils import add_fused_lm_head
from trl_pairs import gradients, make_inputs, pair

from fastgrpo.integrations.trl import _exact, attach

SMALL = tiny.SHAPE | {"head_dim": 8}
HEADS = {
    "plain": ("Llama", {}), "soft-cap": ("Gemma2", {"final_logit_softcapping": 2.0}),
    "multiplied": ("Cohere", {"logit_scale": 3.0}), "divided": ("Granite", {"logits_scaling": 0.3}),
    "bias": ("Phi", {}),
}  # fmt: skip
TEMPERATURE = 0.7


def make_model(name):
    family, changes = HEADS[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SMALL, **changes))
    return tiny.stir(made, std=0.1).eval()  # biases too


def batch():
    ids = torch.randint(2, 64, (3, 9))
    labels = ids.clone()
    labels[:, :4] = labels[1, 7:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels


def both(model, temperature=TEMPERATURE, **options):
    inputs, labels = batch()
    add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"), **options)
    theirs = model(**inputs, labels=labels, fused_lm_head=True)
    attach(model, temperature, options.get("cast_lm_head_to_fp32", False))
    return theirs, model(**inputs, labels=labels, fused_lm_head=True), inputs, labels


@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_scored_as_trl_and_the_model_do(name):
    model = make_model(name)
    theirs, ours, inputs, labels = both(model)
    for mine, other in ((ours.log_probs, theirs.log_probs), (ours.entropy, theirs.entropy)):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    logits = model(**inputs).logits[:, :-1] / TEMPERATURE
    chosen = labels[:, 1:] != -100
    truth = torch.log_softmax(logits, -1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(ours.log_probs, truth.where(chosen, 0), rtol=1e-4, atol=1e-5)
    assert ours.log_probs[chosen].std() > 0.1


def test_a_head_in_fp32_of_a_model_in_bf16():
    model = make_model("plain").bfloat16()
    model.lm_head.float()
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours, *_ = both(model, cast_lm_head_to_fp32=True)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=1e-5, atol=1e-5)


def test_logits_are_never_made(tmp_path, monkeypatch):
    made = pair(tiny.save(tmp_path / "model"), tmp_path, beta=0.1, top_entropy_quantile=0.5)

    def fail(*args):
        raise AssertionError("a head of others was called")

    inputs = make_inputs(made.theirs)
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction.apply", fail)
    for model in (made.ours.model, made.ours.ref_model):
        model.lm_head.register_forward_hook(fail)
    gradients(made.ours, inputs)
    for model in (made.ours.model, made.ours.ref_model):
        ids, ones = inputs["completion_ids"], torch.ones_like(inputs["completion_ids"])
        assert made.ours._get_per_token_logps_and_entropies(model, ids, ones, 4)[0].shape == (6, 4)
    with pytest.raises(AssertionError, match="of others"):
        gradients(made.theirs, inputs)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_head_is_gathered(mesh):
    """FSDP2 leaves the weight as a DTensor where the head is no part of the outermost shard."""
    model = make_model("plain")
    _, whole, inputs, labels = both(model)
    model.lm_head.weight = torch.nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
    sharded = model(**inputs, labels=labels, fused_lm_head=True)
    assert torch.equal(sharded.log_probs, whole.log_probs)
    sharded.log_probs.sum().backward()
    assert isinstance(model.lm_head.weight.grad, DTensor) and model.lm_head.weight.grad.to_local().any()


def test_results_are_exact_where_the_model_casts_what_it_returns():
    model = make_model("plain")
    _, ours, inputs, labels = both(model)

    def cast(**given):
        output = model(**given, labels=labels, fused_lm_head=True)
        return dataclasses.replace(output, log_probs=output.log_probs.bfloat16(), entropy=output.entropy.bfloat16())

    found = _exact(cast, lambda head: (None, head.score(head.labels != -100, True)), **inputs)
    assert torch.equal(found.log_probs, ours.log_probs) and torch.equal(found.entropy, ours.entropy)
