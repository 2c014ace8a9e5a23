"""Low-rank adapters (LoRA, arXiv 2106.09685), which peft adds to the policy's own modules.

A linear layer with weight W computes with W + alpha / r B A, and only A and B are trained. The policy is still the same
transformers model, so hidden states, rollouts and gradient checkpointing need no code for adapters. The base and the
head are frozen: they get no gradients, and the optimizer holds only the adapters. The reference is the policy without
its adapters, and needs no copy in memory.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:  # an extra
    from peft import PeftModel

ADAPTER = ".lora_"  # part of the name of every adapter weight
MAMBA = "falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"  # peft refuses the out_proj of these models


def add_lora(
    model: PreTrainedModel, *, r: int = 16, alpha: float = 32, target_modules: Iterable[str] = (), seed: int = 0
) -> PreTrainedModel:
    """Freeze a prepared policy, and add new adapters.

    The adapters have no dropout, so that the trained policy equals the one that drew the samples. B starts at 0, so
    they change nothing at first.
    """
    return wrap_lora(model, r=r, alpha=alpha, target_modules=target_modules, seed=seed).get_base_model()


def wrap_lora(
    model: PreTrainedModel, *, r: int = 16, alpha: float = 32, target_modules: Iterable[str] = (), seed: int = 0
) -> "PeftModel":
    """Do the same as `add_lora`, and return peft's `PeftModel`."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    refuse_adapters(model)
    names = list(target_modules) or None
    if "all-linear" in target_modules:
        own = {*model.get_decoder().modules()} - {model.get_output_embeddings()}  # without a vision tower
        names = [name for name, module in model.named_modules() if _is_linear(module) and module in own]
        if model.config.get_text_config().model_type in MAMBA:
            names = [name for name in names if not name.endswith("out_proj")]
    config = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=0.0, target_modules=names, task_type="CAUSAL_LM")
    if "all-linear" in target_modules:  # drop names under which peft would adapt fused experts
        found = copy.deepcopy(config)
        convert_peft_config_for_transformers(found, model, None)
        config.target_modules = set(found.target_modules)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            wrapper = get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            if names is None:
                raise ValueError(
                    f"peft has no default layers for a {type(model).__name__}; set lora_target_modules to all-linear "
                    f"or to the names of layers ({error})"
                ) from error
            raise ValueError(f"lora_target_modules {target_modules}: {error}") from error
    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        raise ValueError(
            f"lora_target_modules {target_modules}: peft would also adapt the fused experts of {type(model).__name__}, "
            "which is not supported; name only other layers, such as q_proj k_proj v_proj o_proj"
        )
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(layer, BaseTunerLayer):
            raise ValueError("lora_target_modules must not name the embedding or the head (lm_head), which stay frozen")
    return taken_over(wrapper)


def _is_linear(module):
    """Return whether a module is a product. Subclasses of torch.nn.Linear, such as routers, may be something else."""
    exact = type(module) in (torch.nn.Linear, Conv1D) or type(module).__name__ == "FalconLinear"
    return exact or is_quantized(module)


def taken_over(wrapper: "PeftModel") -> "PeftModel":
    """Register the adapters of a `PeftModel` with its model, as `add_adapter` of transformers does."""
    model = wrapper.get_base_model()
    model._hf_peft_config_loaded = True
    model.disable_input_require_grads()  # peft adds its own hook on the embedding
    tuner = wrapper.base_model
    # Not a closure, so that a deep copy of the wrapper unloads the copy.
    tuner._unload_and_optionally_merge = functools.partial(_unloaded, tuner._unload_and_optionally_merge)
    return wrapper.eval()


def _unloaded(unload, *args, **options):
    """Merge or remove the adapters, as peft does, and tell transformers that the model has none."""
    model = unload(*args, **options)
    model._hf_peft_config_loaded = False
    return model


def base_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights without adapters."""
    weights = model.state_dict().items()
    return {name.replace(".base_layer.", "."): value for name, value in weights if ADAPTER not in name}


def refuse_adapters(model: PreTrainedModel) -> None:
    """Raise if a model has adapters, because the model without them would become the reference."""
    if has_adapters(model):
        raise ValueError(
            "the model has adapters already; start from merged weights: a run with use_peft writes them to merged/ at "
            "its end; merge a checkpoint by peft's merge_and_unload(), and save model and tokenizer to a folder"
        )


def refuse_wrappers(model: Any) -> None:
    """Raise for peft's wrapper of a model."""
    if is_wrapper(model):
        raise ValueError(
            "model is a PeftModel; pass model.merge_and_unload() to train all of its weights; to train new adapters, "
            "save that model and its tokenizer to a folder, and pass the folder with use_peft=True"
        )


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether a model has adapters, from `add_lora` or from a file."""
    return getattr(model, "_hf_peft_config_loaded", False)


def check_adapters(path: str | Path, model: PreTrainedModel) -> None:
    """Raise if the adapters that were loaded with a model are more than LoRA of linear layers inside it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = model.peft_config["default"]
    other = "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters"
    found = [name for name in (*other, "alora_invocation_tokens") if getattr(config, name, None)]
    if config.peft_type != "LORA":
        found = [f"peft_type {config.peft_type}"]
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(layer, BaseTunerLayer):
            found.append("target_modules that name the embedding or the head")
    if found:
        raise ValueError(
            f"model {str(path)!r} has adapters with {', '.join(found)}, which are not supported; merge them with "
            "peft's merge_and_unload(), and save the merged model to a folder"
        )


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Disable the adapters within the context, which gives the policy before training."""
    model.disable_adapters()
    try:
        yield model
    finally:
        model.enable_adapters()


def read_adapters(path: Path) -> dict[str, torch.Tensor]:
    """Read the adapters of a checkpoint folder, in peft's format."""
    from safetensors.torch import load_file

    weights = load_file(path / "adapter_model.safetensors")
    names = {name: name.removeprefix("base_model.model.").removesuffix(".weight") for name in weights}
    return {f"{mine}.default.weight": weights[name] for name, mine in names.items()}


def base_layer(layer: torch.nn.Module) -> torch.nn.Module:
    """Return a layer without its adapter, or the layer itself if it has none."""
    return layer.get_base_layer() if hasattr(layer, "lora_A") else layer


def adapter_of(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """Return A [r, D], B [F, r] and alpha / r of a layer's adapter, or None."""
    if not hasattr(layer, "lora_A") or "default" not in layer.lora_A or layer.disable_adapters:
        return None
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"]


def is_quantized(layer: torch.nn.Module) -> bool:
    """Return whether the weight of a layer has 4 bits."""
    return hasattr(layer, "dequantized")


def dense_weight(layer: torch.nn.Module) -> torch.Tensor:
    """Return the weight W of a layer without its adapter; 4 bits are dequantized."""
    base = base_layer(layer)
    return base.dequantized() if is_quantized(base) else base.weight.detach()


@torch.no_grad()
def merged_weight(layer: torch.nn.Module) -> torch.Tensor:
    """Compute W + alpha / r B A in fp32, and round it once to the dtype of W. Without an adapter, return W."""
    weight, adapter = dense_weight(layer), adapter_of(layer)
    if adapter is None:
        return weight
    down, up, scale = adapter
    change = up.float() @ down.float()
    return torch.add(weight.float(), change.T if layer.fan_in_fan_out else change, alpha=scale).to(weight.dtype)


@torch.no_grad()
def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a policy with adapters into an ordinary model, on the CPU, with weights W + alpha / r B A."""

    def changes(module):
        return hasattr(module, "lora_A") or is_quantized(module)

    layers = [name for name, it in model.named_modules() if changes(it) and not name.endswith(".base_layer")]
    weights = {id(value): value.to("cpu", copy=True) for value in model.parameters()}
    for name in layers:
        layer = model.get_submodule(name)
        weights[id(base_layer(layer).weight)] = merged_weight(layer).cpu()
    memo = {key: torch.nn.Parameter(value, requires_grad=False) for key, value in weights.items()}
    plain = copy.deepcopy(model, memo).cpu()  # deepcopy takes the parameters from the memo
    for name in layers:
        layer = base_layer(plain.get_submodule(name))
        plain.set_submodule(name, layer.dense(layer.weight) if is_quantized(layer) else layer)
    plain.delete_adapter("default")
    return plain


# The fields of a `LoraConfig` that become settings, and those that do not change the computation.
USED = ("r", "lora_alpha", "target_modules", "task_type")
IGNORED = ("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "peft_type")


def is_wrapper(model: Any) -> bool:
    """Return whether a model is a `PeftModel`, without importing peft."""
    return any(base.__name__ == "PeftModel" for base in type(model).__mro__)


def lora_settings(config: Any, name: str = "peft_config") -> dict[str, Any]:
    """Convert a config of peft to our settings."""
    if not any(base.__name__ == "LoraConfig" for base in type(config).__mro__):
        raise ValueError(f"{name} is of type {type(config).__name__}; pass a peft.LoraConfig")
    from peft import LoraConfig

    plain = LoraConfig()
    for field in dataclasses.fields(LoraConfig):
        value, default = getattr(config, field.name), getattr(plain, field.name)
        if field.name not in (*USED, *IGNORED) and (value or default) and value != default:
            raise ValueError(f"{name}: {field.name}={value!r} is not supported; omit {field.name}")
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(f"{name}: task_type={config.task_type!r} is not supported; use CAUSAL_LM")
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


def unwrapped(wrapper: Any, allow_trained: bool) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a `PeftModel`'s model with its adapters, and their settings. Raise for trained ones if not allowed."""
    if list(wrapper.peft_config) != ["default"]:
        names = ", ".join(wrapper.peft_config)
        raise ValueError(f"model is a PeftModel with the adapters {names}; pass one with only the adapter 'default'")
    settings = lora_settings(wrapper.peft_config["default"], "model is a PeftModel, whose config")
    model = wrapper.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a PeftModel of a {type(model).__name__}; wrap a transformers causal LM")
    learned = [name for name, value in model.named_parameters() if ".lora_B." in name and torch.any(value != 0)]
    if learned and not allow_trained:
        raise ValueError(
            "model is a PeftModel with trained adapters, and the KL would be to the model without them; save "
            "model.merge_and_unload() and the tokenizer to a folder, and pass the folder with a peft_config, or set "
            "beta to 0"
        )
    return model, settings
