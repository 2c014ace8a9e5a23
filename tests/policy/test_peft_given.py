"""What peft gives: configs that mean our LoRA, options that do not, and wrapped models."""

import pytest
import tiny
import torch

peft = pytest.importorskip("peft")

from fastgrpo.policy.lora import base_weights, is_wrapper, lora_settings, taken_over, unwrapped  # noqa: E402  # noqa: E402


@pytest.mark.parametrize(
    "options, targets",
    [({}, ()), ({"target_modules": ["v_proj", "q_proj"]}, ("q_proj", "v_proj")),
     ({"target_modules": "all-linear", "task_type": "CAUSAL_LM", "inference_mode": True}, ("all-linear",))],
)  # fmt: skip
def test_configs_become_settings(options, targets):
    settings = lora_settings(peft.LoraConfig(r=4, lora_alpha=12, **options))
    assert settings == {"use_peft": True, "lora_r": 4, "lora_alpha": 12, "lora_target_modules": targets}


@pytest.mark.parametrize(
    "options",
    [{"lora_dropout": 0.1}, {"use_dora": True}, {"use_rslora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]},
     {"init_lora_weights": "gaussian"}, {"init_lora_weights": False}, {"layers_to_transform": [0]},
     {"rank_pattern": {"q_proj": 2}}, {"target_modules": ".*q_proj"}, {"task_type": "SEQ_CLS"}],
)  # fmt: skip
def test_options_that_our_lora_does_not_have_are_named(options):
    with pytest.raises(ValueError, match=f"peft_config: {next(iter(options))}="):
        lora_settings(peft.LoraConfig(**options))


def test_other_configs_are_refused():
    with pytest.raises(ValueError, match=r"peft_config is of type PromptTuningConfig; pass a peft.LoraConfig"):
        lora_settings(peft.PromptTuningConfig(num_virtual_tokens=2))


def wrapped(name="default"):
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny.model(), config, adapter_name=name)


def test_a_wrapper_gives_its_model_and_settings():
    wrapper = wrapped()
    assert is_wrapper(wrapper) and not is_wrapper(wrapper.get_base_model())
    model, settings = unwrapped(wrapper, moved=False)
    assert model is wrapper.get_base_model()
    assert settings == {"use_peft": True, "lora_r": 4, "lora_alpha": 12, "lora_target_modules": ("q_proj",)}
    assert base_weights(model).keys() == tiny.model().state_dict().keys()
    assert taken_over(wrapper) is wrapper and model._hf_peft_config_loaded


def test_adapters_that_have_learned_are_no_reference():
    wrapper = wrapped()
    with torch.no_grad():
        for name, value in wrapper.named_parameters():
            if "lora_B" in name:
                value.fill_(0.1)
    assert unwrapped(wrapper, moved=True)[0] is wrapper.get_base_model()
    with pytest.raises(ValueError, match=r"whose adapters have learned something.*or set beta to 0"):
        unwrapped(wrapper, moved=False)


def test_other_adapters_are_refused():
    with pytest.raises(ValueError, match=r"with the adapters mine; pass one with the adapter 'default' alone"):
        unwrapped(wrapped("mine"), moved=True)
