"""`Policy`: its head, full weights and state, and the models that it is made of."""

import pytest
import tiny
import torch
import transformers

from benchmarks.architectures import tiny_model
from fastgrpo.policy.load import prepare
from fastgrpo.policy.model import Policy, decoder_layers
from fastgrpo.policy.quantized import NF4Linear, quantize

IDS = torch.tensor([5, 9, 20, 7, 11])


def test_logits_and_log_probs_have_the_soft_cap_of_the_model():
    policy = prepare(tiny_model("gemma3_text", final_logit_softcapping=2.0))
    with torch.no_grad():
        out = policy.module(IDS[None], output_hidden_states=True)
    states, logits = out.hidden_states[-1][0], out.logits[0]
    assert (states @ policy.head.weight.T - logits).abs().max() > 0.1  # else the cap would not show
    torch.testing.assert_close(policy.logits(states), logits, atol=1e-5, rtol=1e-5)
    expected = logits.log_softmax(-1).gather(-1, IDS[:, None])[:, 0]
    torch.testing.assert_close(policy.logps_of(states, IDS), expected, atol=1e-5, rtol=1e-5)


def test_layers_are_those_of_the_text_model():
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    text = {**tiny.SHAPE, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert len(decoder_layers(model)) == config.text_config.num_hidden_layers
    assert any(isinstance(layer, NF4Linear) for layer in quantize(model, "nf4", "meta").get_decoder().modules())
    assert not any(isinstance(layer, NF4Linear) for layer in model.model.vision_tower.modules())


def test_layers_inside_of_layers_are_recomputed_with_them():
    mamba = {"mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2, "use_mamba_kernels": False}
    more = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_key_value_heads": 4}
    assert len(decoder_layers(tiny_model("zamba", **mamba, **more))) == 4


def test_the_context_of_yarn_is_that_after_the_scaling():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}
    assert Policy(tiny.model(rope_parameters=rope)).context == 1024


def test_the_state_comes_back_into_the_same_storage():
    policy, other = Policy(tiny.model(seed=1)), Policy(tiny.model(seed=2))
    places = [p.data_ptr() for p in other.module.parameters()]
    other.load_state_dict(policy.state_dict())
    assert [p.data_ptr() for p in other.module.parameters()] == places
    assert all(torch.equal(a, b) for a, b in zip(policy.module.parameters(), other.module.parameters(), strict=True))
    with pytest.raises(ValueError, match="other names or shapes"):
        other.load_state_dict(Policy(tiny.model(hidden_size=64)).state_dict())


def test_a_policy_is_made_of_a_causal_model_also_a_compiled_one():
    model = tiny.model()
    policy = Policy.of(model)
    assert policy.module is model and Policy.of(policy) is policy
    compiled = torch.compile(model, backend="eager")
    assert Policy.of(compiled).module is compiled
    for other in ("Qwen/Qwen2.5-0.5B", model.base_model, torch.nn.DataParallel(model), None):
        with pytest.raises(ValueError, match=f"causal LM .*got a {type(other).__name__}"):
            Policy.of(other)
    model.is_quantized = True
    with pytest.raises(ValueError, match="quantized"):
        prepare(model)
