"""Models without weights, from which the plan of a run's memory is computed."""

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from fastgrpo.config.sections import RewardConfig
from fastgrpo.policy.dry_run import without_weights
from fastgrpo.policy.files import loading, read_config, read_json
from fastgrpo.policy.gguf import find_gguf
from fastgrpo.policy.placement import choose_device, choose_dtype
from fastgrpo.rewards.finding import PRM, names_model
from fastgrpo.rewards.model import same_device
from fastgrpo.rewards.process_model import auto_class

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = ("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok")


def outline(path: str | Path, trust_remote_code: bool = False, download: bool = False) -> PreTrainedModel:
    """Build a causal LM without weights from its config."""
    files = ("config.json", "adapter_config.json")
    local = download or Path(path).is_dir() or find_gguf(path) is not None
    if not local and not any(read_json(path, file, local_files_only=True) for file in files):
        raise ValueError(
            f"no config of a causal LM at {str(path)!r}, neither as a folder nor in the hub's cache (nothing is "
            "downloaded here)"
        )
    config = read_config(path, trust_remote_code, local_files_only=not download)
    with loading(path, "model"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def outline_of(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model in memory without its weights."""
    copied = without_weights(model)
    for mine, own in zip(copied.parameters(), model.parameters(), strict=True):
        mine.requires_grad_(own.requires_grad)
    return copied


def judges_to_come(config: RewardConfig, device: torch.device) -> int:
    """Count the bytes that the reward models of a run will take on its device, from their configs. Loads no weights."""
    stated, total = config.reward_device, 0
    if stated != "auto" and not same_device(choose_device(stated, "reward_device"), device):
        return 0
    code = config.trust_remote_code
    for name in config.reward_funcs:
        path = name.removeprefix(PRM)
        if name.startswith(PRM):
            kind, settings = auto_class(path, code, local_files_only=True), {}
        elif names_model(name):
            kind, settings = AutoModelForSequenceClassification, {"num_labels": 1}
        else:
            continue
        with loading(path, "reward model"), torch.device("meta"):
            made = AutoConfig.from_pretrained(path, trust_remote_code=code, local_files_only=True, **settings)
            model = kind.from_config(made, trust_remote_code=code)
        total += sum(parameter.numel() for parameter in model.parameters())
    return total * choose_dtype("auto", device).itemsize


def unplannable(model: PreTrainedModel) -> str | None:
    """Say why the memory of a model's training cannot be computed."""
    config = model.config.get_text_config()
    if model.get_output_embeddings() is None:
        return "is no causal LM"
    if getattr(model, "is_quantized", False):  # a folder with quantized weights has been refused by its config
        return "has quantized weights"
    for name in (*NEEDED, *OPTIONAL):
        try:
            number = getattr(config, name, None)
        except RuntimeError:  # transformers' refusal where the layers differ, as Gemma 4's
            number = ()
        if not isinstance(number, int) and (name in NEEDED or number is not None):
            return f"has no {name} in its config that all layers share"
    return None
