"""The JSON files beside the weights of a model: what they must hold, and that they cannot name code.

transformers reads many fields without a check, and some of them name code: `attn_implementation` may be a kernel of the
hub, which is downloaded and run. `read_config` therefore clears every choice of an implementation, and transformers
then takes its own default. Code in Python files (`auto_map`) is up to trust_remote_code.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import cached_file

from fastgrpo.config.command import explain
from fastgrpo.policy.gguf import SUFFIX, find_gguf, source_of

# Sizes of a model. transformers would divide by some of them, or build a model without layers.
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
# Fields that change how transformers reads the config itself, or rewrite its classes. No model needs them.
FOREIGN = ("attribute_map", "sub_configs", "configuration_files", "fusion_config")


@contextmanager
def loading(path: str | Path, what: str) -> Iterator[None]:
    """Turn whatever transformers raises for files that cannot be loaded into one ValueError.

    Errors that `explain` can explain (no memory, no permission, a full disk, a missing package) pass as they are.
    """
    path = str(path)
    is_path = path.startswith((".", "/", "~")) or path.count("/") > 1
    if not path or (is_path and not os.path.isdir(path) and not path.lower().endswith(SUFFIX)):
        raise ValueError(f"no such model folder: {path or '(an empty name)'}")
    try:
        yield
    except Exception as error:  # what a damaged file makes of transformers, torch and safetensors is of any type
        if not isinstance(error, ValueError) and explain(error):
            raise
        refuse_code(path, error)
        if type(error).__name__.startswith("StrictDataclass"):  # of huggingface_hub: a field of the config
            raise ValueError(f"{path}/config.json: {_reason(error.__cause__ or error)}; correct the field") from error
        remedy = "the files may be damaged or incomplete" if os.path.exists(path) else "name a folder or a hub id"
        if "GGUF model with architecture" in str(error):
            remedy = "use the model's folder with .safetensors files"
        raise ValueError(f"the {what} of {path!r} cannot be loaded ({remedy}): {_reason(error)}") from error


def _reason(error):
    """Say in one line what an exception of a library means."""
    if type(error).__name__ == "UnpicklingError":  # its own text advises to load the file unsafely
        return "a .bin file is damaged or holds code, which is never run; use the model's .safetensors files"
    text = " ".join(str(error).split())[:300]
    named = isinstance(error, (OSError, ValueError)) or text.startswith("Field ")
    return text if text and named else f"{type(error).__name__}: {text}".rstrip(": ")


def refuse_code(path: str | Path, error: Exception) -> None:
    """Raise an error with the remedy where transformers' error means that the model needs Python code of its own."""
    if "trust_remote_code" in str(error):
        raise ValueError(
            f"{str(path)!r} comes with Python code of its own, which is not run by default; read it, then pass "
            "--trust_remote_code True"
        ) from error


def read_json(path: str | Path, file: str, local_files_only: bool = False) -> dict[str, Any]:
    """Read a JSON file of a model."""
    folder, _ = source_of(path)
    with loading(path, file):
        found = cached_file(
            folder,
            file,
            local_files_only=local_files_only,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        fields = {} if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        named = _named(path, file)
        raise ValueError(f"{named} must hold a JSON object, got a {type(fields).__name__}; copy the file again")
    return fields


def _named(path, file):
    """Name a file of a model. It lies in the folder of the model, or beside the GGUF file."""
    return f"{file} beside {path}" if find_gguf(path) == Path(path) else f"{path}/{file}"


def check_tokenizer_files(path: str | Path) -> None:
    """Refuse a tokenizer whose files have a field that cannot be used; transformers reads config.json for it too."""
    if find_gguf(path) is None:
        _check_config(f"{path}/config.json", read_json(path, "config.json"))
    template = read_json(path, "tokenizer_config.json").get("chat_template")
    if not isinstance(template, (str, list, dict, type(None))):
        named = _named(path, "tokenizer_config.json")
        raise ValueError(f"{named}: chat_template must be text, got {template!r}; correct it")


def read_config(path: str | Path, trust_remote_code: bool = False, local_files_only: bool = False) -> PretrainedConfig:
    """Read the config of a model, in which no implementation of attention or experts is chosen."""
    if find_gguf(path) is None:
        path = _base_of(path, local_files_only)
        _check_config(f"{path}/config.json", read_json(path, "config.json", local_files_only))
    generation = read_json(path, "generation_config.json", local_files_only)
    check_end_ids(f"{_named(path, 'generation_config.json')}: eos_token_id", generation.get("eos_token_id"))
    source, gguf = source_of(path)
    with loading(path, "config" if gguf else "config.json"):
        config = AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=local_files_only, **gguf
        )
    if gguf:
        _check_config(path, config.to_dict())
    _pin(config)
    return config


def _base_of(path, local_files_only):
    """Return where the config of a model is: for adapters without a model beside them, at the base that they name."""
    base = read_json(path, "adapter_config.json", local_files_only).get("base_model_name_or_path")
    if base is None or (Path(path) / "config.json").exists():
        return path
    if not isinstance(base, str):
        raise ValueError(f"{path}/adapter_config.json: base_model_name_or_path must be text, got {base!r}; correct it")
    if find_gguf(base) is not None:
        raise ValueError(
            f"the adapters of {path} belong to the GGUF file {base}, and transformers joins them with ordinary folders "
            "alone; use the folder `merged` of their run"
        )
    return base


def _pin(config):
    """Clear the implementations that a config chooses, and those of the configs inside of it."""
    for inner in vars(config).values():
        if isinstance(inner, PretrainedConfig):
            _pin(inner)
    config._attn_implementation = None
    config._experts_implementation = None


def _check_config(where, fields):
    """Refuse a field of a config.json, or of a config inside of it, that the engine cannot use."""
    for name in FOREIGN:
        if name in fields:
            raise ValueError(f"{where}: {name} is no setting of a model; delete it")
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"{where}: quantization_config says that the weights are quantized ({method}), and training needs plain "
            "weights; use the checkpoint that was not quantized"
        )
    for name in ("dtype", "torch_dtype"):
        dtype = fields.get(name)
        known = isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)
        if not (known or dtype is None or isinstance(dtype, dict)):  # a dict has a dtype for each inner config
            raise ValueError(f"{where}: {name} is {dtype!r}, which is no dtype of torch; write float32 or bfloat16")
    for name in SIZES:
        size = fields.get(name, 1)
        if (isinstance(size, int) and size < 1) or (size is None and name == "max_position_embeddings"):
            raise ValueError(f"{where}: {name} must be a positive number, got {size}; correct it")
    check_end_ids(f"{where}: eos_token_id", fields.get("eos_token_id"))
    for name, inner in fields.items():
        if name.endswith("_config") and isinstance(inner, dict):
            _check_config(f"{where}: {name}", inner)


def check_end_ids(where: str, ids: Any) -> list[int]:
    """Refuse ids of tokens that are no whole numbers, or negative."""
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"{where} must be the id of a token or a list of ids, got {token!r}; correct it")
        if token < 0:
            raise ValueError(f"{where} is {token}, but there is no such token; correct it")
    return ids
