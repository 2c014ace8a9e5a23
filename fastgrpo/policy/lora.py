"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft, put into the policy's own modules.

The policy stays the transformers model it was: hidden states, rollouts and gradient checkpointing see the adapters
without knowing. The base is frozen, so neither its gradients nor the head's are computed, and the optimizer holds the
adapters alone. The policy with its adapters off is the reference: no copy in memory.
"""

import copy
from contextlib import contextmanager
from pathlib import Path

import torch

ADAPTER = ".lora_"  # in the names of its weights


def add_lora(model, *, r=16, alpha=32, target_modules=(), seed=0):
    """Freeze a prepared policy and put fresh adapters into it, without dropout: the policy that trains is the one that
    drew the samples. At the start they change nothing.

    Args:
        r: rank. alpha: the update is scaled by alpha / r. target_modules: names of linear layers, "all-linear" for all
            but the head, or none for peft's choice for the architecture. seed: of their initial weights.

    Returns:
        the model, trained in place.

    Raises:
        ValueError: peft is not installed, no such modules, adapters are there already, or the head or the embedding
            is among the targets.
    """
    try:
        from peft import LoraConfig
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        raise ValueError("use_peft needs the package: pip install 'fastgrpo[lora]'") from None
    refuse_adapters(model)
    names = "all-linear" if "all-linear" in target_modules else list(target_modules) or None
    config = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=0.0, target_modules=names, task_type="CAUSAL_LM")
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            model.add_adapter(config)
        except ValueError as error:
            raise ValueError(f"lora_target_modules {names}: {error}") from error
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(layer, BaseTunerLayer):
            raise ValueError("lora_target_modules must not name the embedding or the head, which stay frozen")
    return model.eval()


def refuse_adapters(model):
    """Raises ValueError for a model with adapters: what it is without them would pass for the reference."""
    if has_adapters(model):
        raise ValueError(
            "the model has adapters already; start from merged weights (a run with use_peft leaves merged/)"
        )


def has_adapters(model):
    """Whether `add_lora` has been here."""
    return getattr(model, "_hf_peft_config_loaded", False)


@contextmanager
def adapters_off(model):
    """Inside, the policy is what it was before training."""
    model.disable_adapters()
    try:
        yield model
    finally:
        model.enable_adapters()


def read_adapters(path: Path) -> dict[str, torch.Tensor]:
    """Read the adapters of a checkpoint folder, which are in peft's format.

    Args:
        path: The folder.

    Returns:
        Weights under the names that they have in the policy's module.
    """
    from safetensors.torch import load_file

    weights = load_file(path / "adapter_model.safetensors")
    names = {name: name.removeprefix("base_model.model.").removesuffix(".weight") for name in weights}
    return {f"{mine}.default.weight": weights[name] for name, mine in names.items()}


@torch.no_grad()
def merged(model):
    """The policy as a plain model on the CPU, sharing nothing with it: W + alpha / r B A, each sum rounded once."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    weights = {id(value): value.to("cpu", copy=True) for value in model.parameters()}
    for name in layers:
        layer = model.get_submodule(name)
        weight, delta = layer.get_base_layer().weight, layer.get_delta_weight("default")
        weights[id(weight)] = (weight.float() + delta.float()).to("cpu", weight.dtype)
    memo = {key: torch.nn.Parameter(value, requires_grad=False) for key, value in weights.items()}
    plain = copy.deepcopy(model, memo).cpu()  # takes its parameters from the memo
    for name in layers:
        plain.set_submodule(name, plain.get_submodule(name).get_base_layer())
    plain.delete_adapter("default")
    return plain
