"""Packed attention: packed sequences equal sequences alone, forward and backward; unsupported models are refused."""

import pytest
import tiny
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from fastgrpo.policy.attention import NAME, PackedAttention
from fastgrpo.policy.device import cast, choose_device
from fastgrpo.policy.load import load_policy, prepare
from fastgrpo.policy.model import Policy


def packed(sequences):
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    return ids, positions, PackedAttention([len(sequence) for sequence in sequences], "cpu")


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_alone(architecture, checkpointing):
    model = tiny.model(architecture, gradient_checkpointing=checkpointing)
    sequences = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
    mixed = torch.randn(9, 32)
    states = Policy.of(model).states(*packed(sequences))
    (states * mixed).sum().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = torch.cat([model.base_model(torch.tensor([s]), use_cache=False).last_hidden_state[0] for s in sequences])
    (alone * mixed).sum().backward()
    torch.testing.assert_close(states, alone, atol=2e-5, rtol=1e-4)
    assert together
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, atol=5e-4, rtol=1e-3, msg=name)


def test_sliding_window_within_reach_is_exact_and_beyond_is_refused():
    torch.manual_seed(0)
    settings = {**tiny.config().to_dict(), "sliding_window": 6}
    settings.pop("model_type")
    settings.pop("layer_types", None)
    policy = prepare(MistralForCausalLM(MistralConfig(**settings)))
    model, states = policy.module, policy.states(*packed([[5, 6, 7, 8], [9, 10]]))
    alone = model.base_model(torch.tensor([[9, 10]]), use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(states[4:], alone, atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="sliding window of 6"):
        policy.states(*packed([[5] * 7]))


def test_soft_capped_attention_is_refused():
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="Gemma2ForCausalLM has soft-capped attention: use --rollout_backend hf"):
        prepare(Gemma2ForCausalLM(config))
    policy = prepare(Gemma2ForCausalLM(config), own_attention=True)
    with pytest.raises(ValueError, match="soft-capped attention"):
        policy.states(*packed([[5, 6]]))


def test_the_attention_without_a_context_names_the_remedy():
    model = tiny.model()
    model.config._attn_implementation = NAME
    with pytest.raises(ValueError, match=r"Qwen2Attention does not get the context that Policy\.states hands"):
        model(torch.tensor([[5, 6]]))


def test_dropout_is_off_everywhere():
    model = tiny.model(attention_dropout=0.5, gradient_checkpointing=True)
    ids, positions, context = packed([[5, 6, 7]])
    assert torch.equal(
        Policy.of(model).states(ids, positions, context), Policy.of(model).states(ids, positions, context)
    )
    layer = torch.nn.Sequential(torch.nn.Dropout(0.5))
    model.extra = layer
    prepare(model)
    assert layer[0].p == 0


def test_casting_spares_the_rotary_frequencies():
    model = tiny.model()
    cast(model, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.base_model.rotary_emb.inv_freq.dtype == torch.float32


def test_layers_that_are_not_attention_are_refused():
    model = tiny.model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        prepare(model)


def test_checkpointed_layers_train_only_where_there_is_a_backward():
    model = tiny.model(gradient_checkpointing=True)
    ids, positions, context = packed([[5, 6, 7]])
    with torch.no_grad():
        Policy.of(model).states(ids, positions, context)
    assert not any(module.training for module in model.modules())
    calls = []
    layer = model.base_model.layers[0]
    layer._gradient_checkpointing_func = lambda f, *a, **k: calls.append(1) or f(*a, **k)
    Policy.of(model).states(ids, positions, context)
    assert calls == [1]


def test_loading_from_a_folder(tmp_path):
    tiny.save(tmp_path)
    policy, tokenizer = load_policy(tmp_path, dtype="bfloat16", device="cpu", gradient_checkpointing=True)
    assert policy.dtype == torch.bfloat16 and policy.module.is_gradient_checkpointing
    assert tokenizer.decode(tokenizer("ab 1")["input_ids"]) == "ab 1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is there")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match="no CUDA device"):
        choose_device("cuda")
