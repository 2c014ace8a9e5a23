"""Lean layers: transformers' results to the bit, its gradients, and fewer activations."""

import copy

import pytest
import tiny
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from fastgrpo.policy.lean_layers import RMSNorm, SwiGLU, apply_lean, would_keep_less
from fastgrpo.policy.load import load_policy

CPU = torch.device("cpu")


def replaced(model):
    """The classes of the modules whose forward function was replaced."""
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


def states_and_gradients(model, ids):
    states = model.base_model(ids, use_cache=False).last_hidden_state
    weights = [parameter for parameter in model.base_model.parameters() if parameter.requires_grad]
    return states, torch.autograd.grad((states * states.detach().cos()).sum(), weights)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_model_computes_what_it_did(architecture):
    model, ids = tiny.model(architecture), torch.randint(2, 64, (3, 20))
    lean, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    apply_lean(lean)
    assert len(replaced(lean)) == 2 and not replaced(model)
    (expected, plain), (states, gradients) = states_and_gradients(model, ids), states_and_gradients(lean, ids)
    assert torch.equal(states, expected)
    for ours, theirs, true in zip(gradients, plain, states_and_gradients(exact, ids)[1], strict=True):
        error, allowed = (ours - true).norm(), 2 * (theirs - true).norm() + 1e-6 * true.norm()
        assert error <= allowed


def test_the_gradients_are_those_of_the_formulas():
    x, w, up = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4, 5), (5,), (3, 4, 5)))
    assert torch.autograd.gradcheck(lambda x, w: RMSNorm.apply(x, w, 1e-2), (x, w))
    assert torch.autograd.gradcheck(SwiGLU.apply, (x, up))


def test_frozen_norms_and_inputs_get_no_gradient():
    x, w = torch.randn(3, 5), torch.randn(5)
    for inputs in ((x.clone().requires_grad_(), w), (x, w.clone().requires_grad_())):
        RMSNorm.apply(*inputs, 1e-6).sum().backward()
        assert [tensor.grad is not None for tensor in inputs] == [tensor.requires_grad for tensor in inputs]


def test_only_what_computes_the_same_is_replaced():
    gemma = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8,
        )
    )  # fmt: skip
    gelu = tiny.model("llama", hidden_act="gelu")
    half = tiny.model().to(torch.bfloat16)
    for model, names in ((gemma, set()), (gelu, {"LlamaRMSNorm"}), (half, set())):
        apply_lean(model)
        assert replaced(model) == names
    model = tiny.model()
    assert would_keep_less(model, torch.float32, CPU) and not would_keep_less(gelu, torch.float32, CPU)
    assert not would_keep_less(model, torch.bfloat16, CPU)
    assert not would_keep_less(model, torch.float32, torch.device("cuda"))


def test_a_forward_that_was_replaced_before_stays():
    model = tiny.model()
    norm = model.base_model.norm
    norm.forward = own = lambda states: states
    apply_lean(model)
    assert norm.forward is own and "forward" in vars(model.base_model.layers[0].mlp)


def test_a_model_that_is_cast_later_rounds_as_it_did():
    model, ids = tiny.model(), torch.randint(2, 64, (1, 20))
    plain = copy.deepcopy(model).to(torch.bfloat16)
    apply_lean(model)
    cast = model.to(torch.bfloat16)
    for ours, theirs in zip(states_and_gradients(cast, ids)[1], states_and_gradients(plain, ids)[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())
    assert torch.equal(states_and_gradients(cast, ids)[0], states_and_gradients(plain, ids)[0])


def test_a_copy_computes_with_its_own_weights():
    model, ids = tiny.model(), torch.randint(2, 64, (1, 20))
    apply_lean(model)
    other = copy.deepcopy(model)
    before = model.base_model(ids, use_cache=False).last_hidden_state
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert torch.equal(other.base_model(ids, use_cache=False).last_hidden_state, before)


def test_policies_on_a_cpu_are_lean(tmp_path):
    tiny.save(tmp_path / "model")
    policy, _ = load_policy(tmp_path / "model", dtype="float32", device="cpu")
    assert replaced(policy.module) == {"Qwen2RMSNorm", "Qwen2MLP"}
