"""Models without weights: of a folder, of a model in memory, and those whose memory cannot be planned."""

import pytest
import tiny
import torch
from transformers import CONFIG_MAPPING

from benchmarks import architectures
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.policy import dry_run
from fastgrpo.policy.dry_run import unplannable
from fastgrpo.policy.load import outline
from fastgrpo.trainer.memory import plan_run

GIB = 2**30


def without_weights(name, **changes):
    """A tiny model of an architecture, on the meta device."""
    config = CONFIG_MAPPING[name](**architectures.SHAPE | architectures.ARCHITECTURES.get(name, {}) | changes)
    with torch.device("meta"):
        return architectures.class_of(name)(config)


def test_nothing_is_downloaded(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a download was begun")

    monkeypatch.setattr("socket.socket.connect", refuse)
    with pytest.raises(ValueError, match=r"no config of a causal LM at 'org/model'.*nothing is downloaded"):
        outline("org/model")


def test_a_model_in_memory_keeps_its_weights_and_the_outline_knows_which_are_trained():
    model = tiny.model(tie_word_embeddings=True)
    model.get_input_embeddings().weight.requires_grad_(False)
    copied = dry_run.without_weights(model)
    assert all(parameter.is_meta for parameter in copied.parameters())
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight
    trained = {name for name, parameter in copied.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert 0 < len(trained) < len(list(copied.named_parameters()))


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_every_architecture_is_planned_or_left_to_loading(name):
    """What loading would refuse, or would hand to the hf backend, must not end in an error of the plan before."""
    model = without_weights(name)
    for backend in ("fast", "hf"):
        planned = plan_run(GRPOConfig(device="cpu", rollout_backend=backend), model, room=GIB)
        assert (planned is None) == (name == "gemma4_text")
        assert planned is None or planned.needed > 0


def test_why_the_memory_of_a_model_cannot_be_planned():
    assert unplannable(without_weights("llama")) is None
    assert unplannable(tiny.model().base_model) == "is no causal LM"
    assert unplannable(without_weights("gemma4_text")) == "has no head_dim in its config that all layers share"
    gemma3n = {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]}
    gemma3n |= {"activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [64, 64]}
    several = without_weights("gemma3n_text", **gemma3n)
    assert unplannable(several) == "has no intermediate_size in its config that all layers share"
    quantized = tiny.model()
    quantized.is_quantized = True
    assert unplannable(quantized) == "has quantized weights"
    assert plan_run(GRPOConfig(device="cpu"), quantized, room=GIB) is None
