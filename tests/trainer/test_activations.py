"""The computed activations against the tensors that autograd keeps."""

import pytest
import tiny
import torch
from transformers import Qwen3MoeConfig

from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.model import Policy
from fastgrpo.trainer import memory as activations
from fastgrpo.trainer.memory import activation_bytes


def kept(model, batch):
    """Bytes that autograd keeps of a forward pass, beside the model's own tensors."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held = []  # the tensors themselves, so that no address is used twice
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        Policy(model).completion_states(batch)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(size for address, size in storages.items() if address not in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_a_layer_keeps_what_the_formula_says(architecture, dtype):
    batch = Batch.pack([Sample(list(range(5, 25)), [7] * 30, 1.0)] * 4, "cpu")
    models = [tiny.model(architecture, num_hidden_layers=layers).to(dtype) for layers in (1, 3)]
    one, three = (kept(model, batch) for model in models)
    tokens = len(batch.input_ids)
    assert (three - one) / (2 * tokens) == activations._layer_bytes(models[0], dtype.itemsize, fused=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_gradient_checkpointing_a_layer_keeps_its_input(dtype):
    batch = Batch.pack([Sample(list(range(5, 25)), [7] * 30, 1.0)] * 4, "cpu")
    one, three = (
        kept(tiny.model(num_hidden_layers=layers, gradient_checkpointing=True).to(dtype), batch) for layers in (1, 3)
    )
    assert (three - one) / 2 == len(batch.input_ids) * 32 * dtype.itemsize  # a hidden size of 32


def test_what_saves_memory():
    model = tiny.model("qwen3", num_hidden_layers=4)

    def planned(tokens=100, checkpointing=False, fused=False):
        return sum(activation_bytes(model, torch.bfloat16, tokens, checkpointing=checkpointing, fused=fused))

    assert planned(200) == 2 * planned() > planned() > planned(fused=True) > planned(checkpointing=True)
    layer = 100 * activations._layer_bytes(model, 2, fused=False)
    assert planned() - planned(checkpointing=True) == 3 * layer - 4 * 100 * 32 * 2
    without, again = (activation_bytes(model, torch.bfloat16, 100, checkpointing=on) for on in (False, True))
    assert again[2] - without[2] == layer  # the layer that is computed again is there for its backward


def test_experts_count_as_often_as_they_compute_a_token():
    config = Qwen3MoeConfig(hidden_size=32, intermediate_size=640, moe_intermediate_size=48, num_experts_per_tok=2)
    assert activations._mlp_width(config) == (96, 2)
    assert activations._mlp_width(tiny.config()) == (64, 0)
