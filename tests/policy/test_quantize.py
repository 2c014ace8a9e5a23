"""Quantization: which layers it replaces and what it asks of the packages, with stand-ins for them.

The packages themselves, and the error of their weights, are in test_reference.py.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import tiny
import torch

from fastgrpo.policy.ref_model import quantize

LINEAR = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}


class Linear4bit(torch.nn.Linear):
    """bitsandbytes 0.45's constructor, as far as it is called here."""

    def __init__(self, input_features, output_features, bias=True, compute_dtype=None, compress_statistics=True,
                 quant_type="fp4", quant_storage=torch.uint8, device=None):  # fmt: skip
        super().__init__(input_features, output_features, bias, device=device)
        self.compute_dtype, self.quant_type = compute_dtype, quant_type


class Params4bit(torch.nn.Parameter):
    def __new__(cls, data, requires_grad=True, quant_type="fp4", module=None):
        assert quant_type == "nf4" and module is not None
        return super().__new__(cls, data, requires_grad)


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins for both packages; the arguments with which torchao's `quantize_` was called."""
    calls = []

    def quantize_(model, config, filter_fn=None, device=None):
        chosen = {name for name, module in model.named_modules() if filter_fn(module, name)}
        calls.append(SimpleNamespace(config=config, chosen=chosen, device=device))

    def stand_in(package, child, **content):
        module = ModuleType(child)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, child, module)

    stand_in("torchao", "torchao.quantization", Int8WeightOnlyConfig=lambda **how: how, quantize_=quantize_)
    stand_in("bitsandbytes", "bitsandbytes.nn", Linear4bit=Linear4bit, Params4bit=Params4bit)
    return calls


def linear_layers(model):
    """The linear layers that are to be quantized: those of the decoder's layers, not the head."""
    return {name for name, _ in model.named_modules() if name.split(".", 3)[-1] in LINEAR}


@pytest.mark.parametrize("architecture", ["qwen2", "smollm3-like"])  # with a head of its own, and tied to the embedding
def test_int8_is_asked_of_all_linear_layers_but_the_head(packages, architecture):
    model = tiny.model(architecture)
    assert quantize(model, "int8", "cpu") is model
    (call,) = packages
    assert call.chosen == linear_layers(model) and len(call.chosen) == 2 * len(LINEAR)
    assert call.config == {"set_inductor_config": False}  # or torchao would switch TF32 on
    assert call.device == torch.device("cpu")


def test_nf4_replaces_all_linear_layers_but_the_head(packages):
    exact, model = (tiny.model(hidden_size=64).bfloat16().requires_grad_(False) for _ in range(2))
    assert quantize(model, "nf4", "cpu") is model
    replaced = {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    assert replaced == linear_layers(exact)
    for name in replaced:
        ours, theirs = model.get_submodule(name), exact.get_submodule(name)
        assert type(ours.weight) is Params4bit and not ours.weight.requires_grad
        assert (ours.quant_type, ours.compute_dtype) == ("nf4", torch.bfloat16)
        assert torch.equal(ours.weight, theirs.weight)
        assert (ours.bias is None) == (theirs.bias is None)
        assert ours.bias is None or torch.equal(ours.bias, theirs.bias)
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(model(ids).logits, exact(ids).logits)  # the stand-ins round nothing


def test_nf4_on_a_cpu_refuses_widths_that_bitsandbytes_reads_wrongly(packages):
    with pytest.raises(ValueError, match=r"q_proj has 32 inputs: on a CPU .*unless that is a multiple of 64; use"):
        quantize(tiny.model(), "nf4", "cpu")
