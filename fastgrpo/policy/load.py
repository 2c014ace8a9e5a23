"""Loads a policy and its tokenizer, and checks that they match and that the engine supports them.

A config may name code to run: `attn_implementation` may be a kernel on the hub, which is downloaded. `read_config`
therefore clears all choices of implementations, so that transformers uses its defaults. Code in Python files
(`auto_map`) needs trust_remote_code.
"""

import gc
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from fastgrpo.config.command import explain
from fastgrpo.policy.attention import Unfit, attention_of
from fastgrpo.policy.device import cast, check_folder, choose_device, choose_dtype
from fastgrpo.policy.dry_run import dry_run
from fastgrpo.policy.gguf import complete, find_gguf, set_special_tokens, source_of, unpacked
from fastgrpo.policy.liger_layers import apply_liger
from fastgrpo.policy.lora import base_weights, check_adapters, has_adapters, read_adapters, refuse_wrappers
from fastgrpo.policy.model import Policy, narrow_window
from fastgrpo.policy.quantized import quantize

logger = logging.getLogger(__name__)
# Whether a rollout backend comes with the model's own attention; None: if packed attention does not support the model.
OWN_ATTENTION = {"auto": None, "fast": False, "eager": False, "hf": True, "vllm": False}


@contextmanager
def loading(path: str | Path, what: str) -> Iterator[None]:
    """Convert any exception of transformers while loading files into a ValueError of one line.

    Errors that `explain` covers (no memory, no permission, a full disk, a missing package) are not converted.
    """
    path = str(path)
    check_folder(path)
    try:
        yield
    except Exception as error:  # damaged files make transformers, torch and safetensors raise any type
        if not isinstance(error, ValueError) and explain(error):
            raise
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{path!r} has its own Python code, which is not run by default; review it, then pass "
                "--trust_remote_code True"
            ) from error
        if type(error).__name__.startswith("StrictDataclass"):  # huggingface_hub: an invalid field of the config
            raise ValueError(f"{path}/config.json: {_reason(error.__cause__ or error)}; correct the field") from error
        remedy = "the files may be damaged or incomplete" if os.path.exists(path) else "pass a folder or a hub id"
        if "GGUF model with architecture" in str(error):
            remedy = "use the model's folder with .safetensors files"
        raise ValueError(f"the {what} of {path!r} cannot be loaded ({remedy}): {_reason(error)}") from error


def _reason(error):
    """Describe a library's exception in one line."""
    if type(error).__name__ == "UnpicklingError":  # its own message recommends unsafe loading
        return "a .bin file is damaged or holds code, which is never run; use the model's .safetensors files"
    text = " ".join(str(error).split())[:300]
    named = isinstance(error, (OSError, ValueError)) or text.startswith("Field ")
    return text if text and named else f"{type(error).__name__}: {text}".rstrip(": ")


def read_json(path: str | Path, file: str, local_files_only: bool = False) -> dict[str, Any]:
    """Read a JSON file of a model."""
    folder, _ = source_of(path)
    with loading(path, file):
        found = _find(folder, file, local_files_only)
        fields = {} if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(
            f"{file} of {path} must hold a JSON object, got a {type(fields).__name__}; copy the file again"
        )
    return fields


def _find(path, file, local_files_only):
    """Return the path of a file of a model in a folder or on the hub, or None."""
    return cached_file(
        path,
        file,
        local_files_only=local_files_only,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def read_config(path: str | Path, trust_remote_code: bool = False, local_files_only: bool = False) -> PretrainedConfig:
    """Read the config of a model, and clear its choices of implementations for attention and experts."""
    if find_gguf(path) is None and not (Path(path) / "config.json").exists():
        base = read_json(path, "adapter_config.json", local_files_only).get("base_model_name_or_path")
        if base is not None and find_gguf(base) is not None:
            raise ValueError(
                f"the adapters of {path} belong to the GGUF file {base}, but transformers loads adapters only onto "
                "model folders; use the folder `merged` of their run"
            )
        if base is not None:
            try:
                check_folder(base)
            except ValueError as error:
                raise ValueError(
                    f"{path} holds adapters, and their base model cannot be used: {error}; correct "
                    "base_model_name_or_path in adapter_config.json"
                ) from None
        path = base or path  # a folder with adapters only uses the config of their base
    source, gguf = source_of(path)
    with loading(path, "config" if gguf else "config.json"):
        config = AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=local_files_only, **gguf
        )
    _pin(config, f"{path}/config.json")
    read_json(path, "generation_config.json", local_files_only)  # transformers ignores one that is damaged
    return config


def _pin(config, where):
    """Raise for quantized weights, and clear the choices of implementations in a config and its inner configs."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"{where}: quantization_config names quantized weights ({method}), which cannot be trained; use the "
            "checkpoint before quantization"
        )
    for name, inner in vars(config).items():
        if isinstance(inner, PretrainedConfig):
            _pin(inner, f"{where}: {name}")
    config._attn_implementation = None
    config._experts_implementation = None


def load_policy(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    own_attention: bool | None = False,
    use_liger_kernel: bool | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    load_in_4bit: bool = False,
) -> tuple[Policy, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer from a folder, the hub or a GGUF file."""
    tokenizer = tokenizer or load_tokenizer(path, trust_remote_code)
    model = load_model(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code, load_in_4bit=load_in_4bit)
    policy = prepare(model, gradient_checkpointing, own_attention)
    apply_liger(model, use_liger_kernel)
    check_vocabulary(policy, tokenizer)
    return policy, tokenizer


def policy_and_tokenizer(
    model: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: Any
) -> tuple[Policy, PreTrainedTokenizerBase]:
    """Load a trainer's model, or take the given one, on the device and in the dtype of the settings."""
    own_attention = OWN_ATTENTION[config.rollout_backend]
    refuse_wrappers(model)
    if not isinstance(model, (str, Path, PreTrainedModel)):
        raise ValueError(
            f"model is of type {type(model).__name__}; pass a folder, a hub id, a GGUF file or a transformers causal LM"
        )
    if not isinstance(model, PreTrainedModel):
        return load_policy(
            model,
            dtype=config.dtype,
            device=config.device,
            gradient_checkpointing=config.gradient_checkpointing,
            trust_remote_code=config.trust_remote_code,
            own_attention=own_attention,
            use_liger_kernel=config.use_liger_kernel,
            tokenizer=tokenizer,
            load_in_4bit=config.load_in_4bit,
        )
    if tokenizer is None and not model.config._name_or_path:
        raise ValueError("a model created in memory has no tokenizer to load; pass processing_class")
    _refuse_quantized(model)
    low = [name for name, value in model.named_buffers() if "inv_freq" in name and value.itemsize < 4]
    if low:
        raise ValueError(
            f"the buffer {low[0]} of the model was cast to 16 bits, and checkpoints do not contain it; load the model "
            "with dtype=torch.bfloat16 instead of casting it"
        )
    device = choose_device(config.device)
    cast(model, choose_dtype(config.dtype, device))
    _placed(model, device, config.load_in_4bit)
    policy = prepare(model, config.gradient_checkpointing, own_attention)
    apply_liger(model, config.use_liger_kernel)
    tokenizer = tokenizer or load_tokenizer(model.config._name_or_path, config.trust_remote_code)
    check_vocabulary(policy, tokenizer)
    return policy, tokenizer


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    load_in_4bit: bool = False,
) -> PreTrainedModel:
    """Load a causal LM from a folder, the hub or a GGUF file."""
    device = choose_device(device)
    config = read_config(path, trust_remote_code)
    source, gguf = source_of(path)
    with loading(path, "model"):
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=choose_dtype(dtype, device),
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # `_check_weights` raises for them, by name
            output_loading_info=True,
            **unpacked(gguf),
        )
    if has_adapters(model):
        check_adapters(path, model)
    _check_weights(path, model, report)
    if gguf:
        complete(model, path)
    model.name_or_path = model.config.name_or_path = str(path)  # transformers sets the folder of a GGUF file
    return _placed(model, device, load_in_4bit)


def _placed(model, device, load_in_4bit):
    if device.type == "cuda":
        gc.collect()  # frees an earlier model with layers of Liger, which are in reference cycles
    return quantize(model, "nf4", device) if load_in_4bit else model.to(device)


def _check_weights(path, model, report):
    """Raise if the weights of a model do not match its config. `report` is transformers' loading info."""
    layered = {_any_layer(name) for name, _ in model.named_parameters()}
    problems = (
        (report["missing_keys"], "lacks {count} of its weights ({name}, ...), which would be random"),
        (
            [f"{name}: {tuple(found)} and not {tuple(wanted)}" for name, found, wanted in report["mismatched_keys"]],
            "has {count} weights of other shapes than config.json describes ({name})",
        ),
        (
            [name for name in report["unexpected_keys"] if _any_layer(name) in layered],
            "has {count} weights of layers beyond those that config.json counts ({name}, ...)",
        ),
    )
    for names, problem in problems:
        if names:
            problem = problem.format(count=len(names), name=sorted(names)[0])
            raise ValueError(f"model {str(path)!r} {problem}; check that the folder is complete and holds a causal LM")


def _any_layer(name):
    return re.sub(r"\.\d+\.", ".N.", name)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, hub id or GGUF file."""
    source, gguf = source_of(path)
    with loading(path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **gguf)
    if gguf:
        set_special_tokens(tokenizer)
    return tokenizer


def stop_token_ids(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a completion: the tokenizer's end token and those of the model's generation config.

    Ids outside the model's vocabulary are dropped with a warning: if the config of a small model names no end token,
    transformers writes the one of the full-sized model into its generation config.
    """
    model, count = policy.module, policy.module.get_input_embeddings().weight.shape[0]
    configured = model.generation_config.eos_token_id if model.generation_config else None
    configured = configured if isinstance(configured, list) else [configured]
    ids = sorted({*configured, tokenizer.eos_token_id} - {None})
    stops = tuple(token for token in ids if token < count)
    beyond = f"end tokens {ids[len(stops) :]}, but the model has only {count} tokens"
    if not stops:
        problem = f"the tokenizer and generation_config.json name {beyond}" if ids else "the tokenizer has no end token"
        raise ValueError(
            f"{problem}, so no completion could end; set eos_token in tokenizer_config.json or eos_token_id in "
            "generation_config.json"
        )
    if len(stops) < len(ids):
        logger.warning("the tokenizer or generation_config.json names %s: completions end at %s", beyond, list(stops))
    return stops


def check_vocabulary(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise if a tokenizer has more tokens than the policy has embeddings."""
    embeddings = policy.module.get_input_embeddings().weight.shape[0]
    if tokenizer.vocab_size > embeddings:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding only {embeddings}; use the "
            "tokenizer that the model was trained with"
        )


def _refuse_quantized(model):
    """Raise for a model with quantized weights: casting would corrupt them."""
    if getattr(model, "is_quantized", False):
        name = type(model).__name__
        raise ValueError(f"{name} has quantized weights, which cannot be trained; load it without quantization")


def prepare(model: PreTrainedModel, gradient_checkpointing: bool = False, own_attention: bool | None = False) -> Policy:
    """Make a policy from a model: turn dropout off, and raise for a model that the engine would compute wrongly.

    `own_attention` None allows the model's own attention, and logs it, if the engine does not support the model.
    """
    name = type(model).__name__
    if model.get_output_embeddings() is None or model.config.is_encoder_decoder:
        raise ValueError(f"{name} is not a causal LM; load the model with AutoModelForCausalLM")
    if model.base_model is model:  # such as Llama 4's text model, which has the prefix of its multimodal model
        raise ValueError(f"{name}: it has no submodule {model.base_model_prefix!r} that returns the hidden states")
    _refuse_quantized(model)
    forwards = [kind for kind in type(model).__mro__ if "forward" in vars(kind)]
    of_transformers = [kind.__module__.startswith("transformers.models.") for kind in forwards]
    if not of_transformers[0] and any(of_transformers):
        raise ValueError(
            f"{name}.forward overrides that of {forwards[1].__name__}, but log-probs are computed from the hidden "
            "states and the head without calling it; make the change in a submodule"
        )
    obstacle, grouped = dry_run(model)
    if obstacle and own_attention is False:
        raise Unfit(obstacle, name)
    inside = {id(p) for part in (model.base_model, model.get_output_embeddings()) for p in part.parameters()}
    outside = [key for key, p in model.named_parameters() if id(p) not in inside and p.ndim > 1]
    if between := [key for key in outside if key.startswith(("cls.", "lm_head.", "generator_predictions."))]:
        raise ValueError(f"{name}: log-probs would not depend on {between[0]}, which follows the last hidden states")
    if obstacle and own_attention is None:
        logger.warning("%s %s, so rollout_backend=auto uses transformers' generate, which is slow", name, obstacle)
        own_attention = True
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # transformers' SDPA ignores the cap
    for module in model.modules():  # the trained policy must equal the policy that drew the samples
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for knob, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in knob or knob in ("layerdrop", "router_jitter_noise")):
                setattr(module, knob, 0.0)
    model.eval()
    _check_generation_config(model)
    if gradient_checkpointing:
        # The backward pass recomputes layers outside `Policy.states`, and must use the same attention.
        def contexts():
            return nullcontext(), attention_of(model, model.config._attn_implementation)

        settings = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
        model.gradient_checkpointing_enable(settings)
        # Its hook on the embedding is for reentrant checkpointing, and would keep rollouts from their fused layers.
        model.disable_input_require_grads()
    else:
        model.gradient_checkpointing_disable()
    needed = (obstacle or narrow_window(model.config.get_text_config())) is not None
    return Policy(model, bool(own_attention and needed), None if obstacle else grouped)


def _check_generation_config(model):
    """Repair an inconsistent generation config, or raise: transformers would raise when it saves a checkpoint."""
    config = model.generation_config
    try:
        if config is not None:
            config.validate(strict=True)
    except ValueError:
        config.do_sample = True  # it has sampling settings
        try:
            config.validate(strict=True)
        except ValueError as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"the model's generation_config.json is invalid and cannot be saved again; correct it: {reason}"
            ) from None
        logger.warning(
            "the model's generation_config.json has sampling settings but no do_sample; checkpoints get do_sample=True"
        )


def refuse_changed(model: PreTrainedModel) -> None:
    """Raise if a model has other embeddings, or other first rows of weights, than the files it was loaded from.

    Checkpoints with LoRA hold only adapters and the name of the base model, so a change in memory would be lost.
    """
    name, count = model.name_or_path, len(model.get_input_embeddings().weight)
    if not name or (name.startswith((".", "/", "~")) and not Path(name).exists()):  # made in memory, or moved since
        return
    rows = read_json(name, "config.json", local_files_only=True).get("vocab_size", count)
    changed = {f"it has {count} embeddings instead of {rows}": rows != count}
    weights = base_weights(model)
    for file in _weight_files(name):
        with safe_open(file, "pt") as held:
            for key in weights.keys() & held.keys():
                changed[f"{key} differs"] = _differs(held.get_slice(key), weights[key])
    if problem := next((what for what, found in sorted(changed.items()) if found), None):
        raise ValueError(
            f"the model was changed after it was loaded from {name} ({problem}), and checkpoints with LoRA contain "
            "only the adapters; save the model and its tokenizer to a folder, and pass the folder"
        )


def _differs(stored, value):
    """Return whether the first row of a weight differs from its file, unless transformers or a cast converted it."""
    if stored.get_shape() != list(value.shape) or not stored.get_shape() or not value.is_floating_point():
        return False
    row, dtypes = stored[:1], (value.dtype, torch.bfloat16, torch.float16)
    same = any(torch.equal(row.to(dtype).to(value.dtype), value[:1].cpu()) for dtype in dtypes)
    return row.dtype.itemsize > 1 and not same


def _weight_files(path):
    """Return the safetensors files of a model in a folder or in the hub's cache."""
    if find_gguf(path) is not None:
        return []
    if whole := _find(path, "model.safetensors", local_files_only=True):
        return [whole]
    shards = read_json(path, "model.safetensors.index.json", local_files_only=True).get("weight_map", {})
    found = [_find(path, name, local_files_only=True) for name in sorted({*shards.values()})]
    return [file for file in found if file is not None]


def read_weights(policy: Policy, path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a checkpoint folder."""
    if has_adapters(policy.module):
        return read_adapters(path)
    module = policy.module
    with loading(path, "weights"):
        model, report = type(module).from_pretrained(
            path,
            config=module.config,  # not the checkpoint's config.json, which may choose other implementations
            dtype=policy.dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_weights(path, model, report)
    return model.state_dict()


def outline(path: str | Path, trust_remote_code: bool = False, download: bool = False) -> PreTrainedModel:
    """Build a causal LM without weights from its config."""
    files = ("config.json", "adapter_config.json")
    local = download or Path(path).is_dir() or find_gguf(path) is not None
    if not local and not any(read_json(path, file, local_files_only=True) for file in files):
        raise ValueError(
            f"no config of a causal LM at {str(path)!r}, which is neither a folder nor in the hub's cache; download it "
            "first, since nothing is downloaded here"
        )
    config = read_config(path, trust_remote_code, local_files_only=not download)
    with loading(path, "model"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
