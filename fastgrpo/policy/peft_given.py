"""What peft gives us as a model or as a config: taken over where our LoRA means the same, and refused by option."""

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedModel

# What `add_lora` has, and what says nothing of the computation.
MEANT = ("r", "lora_alpha", "target_modules", "task_type")
ASIDE = ("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "peft_type")


def is_wrapper(model: Any) -> bool:
    """Tell whether a model is peft's wrapper of one, without importing peft."""
    return any(base.__name__ == "PeftModel" for base in type(model).__mro__)


def lora_settings(config: Any, name: str = "peft_config") -> dict[str, Any]:
    """Translate a config of peft into our settings."""
    if not any(base.__name__ == "LoraConfig" for base in type(config).__mro__):
        raise ValueError(f"{name} is of type {type(config).__name__}; pass a peft.LoraConfig")
    from peft import LoraConfig

    plain = LoraConfig()
    for field in dataclasses.fields(LoraConfig):
        value = getattr(config, field.name)
        if field.name not in (*MEANT, *ASIDE) and value and value != getattr(plain, field.name):
            raise ValueError(f"{name}: {field.name}={value!r} is not in fastgrpo; leave {field.name} out")
        if field.name not in (*MEANT, *ASIDE) and not value and getattr(plain, field.name):
            raise ValueError(f"{name}: {field.name}={value!r} is not in fastgrpo; leave {field.name} out")
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(f"{name}: task_type={config.task_type!r} is not that of a causal LM; use CAUSAL_LM")
    targets = config.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        raise ValueError(f"{name}: target_modules={targets!r} is a pattern; list the names of the layers")
    targets = (targets,) if isinstance(targets, str) else tuple(sorted(targets or ()))
    return {
        "use_peft": True,
        "lora_r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_target_modules": targets,
    }


def unwrapped(wrapper: Any, moved: bool) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Take the transformers model, with the adapters in it, out of peft's wrapper."""
    if list(wrapper.peft_config) != ["default"]:
        names = ", ".join(wrapper.peft_config)
        raise ValueError(f"model is a PeftModel with the adapters {names}; pass one with the adapter 'default' alone")
    settings = lora_settings(wrapper.peft_config["default"], "model is a PeftModel, whose config")
    model = wrapper.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a PeftModel of a {type(model).__name__}; wrap a transformers causal LM")
    learned = [name for name, value in model.named_parameters() if ".lora_B." in name and torch.any(value != 0)]
    if learned and not moved:
        raise ValueError(
            "model is a PeftModel whose adapters have learned something, and the KL would be to the model without "
            "them; pass model.merge_and_unload() with a peft_config, or set beta to 0"
        )
    return model, settings
