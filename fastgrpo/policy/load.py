"""Loads a policy and its tokenizer, and checks that they fit each other and that the engine can run them exactly."""

import logging
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.policy.attention import Unfit, attention_of
from fastgrpo.policy.dry_run import dry_run
from fastgrpo.policy.files import check_end_ids, check_tokenizer_files, loading, read_config
from fastgrpo.policy.gguf import set_special_tokens, source_of, unpacked
from fastgrpo.policy.liger_layers import apply_liger
from fastgrpo.policy.lora import has_adapters, read_adapters, refuse_wrappers
from fastgrpo.policy.model import Policy
from fastgrpo.policy.own_attention import narrow_window
from fastgrpo.policy.placement import cast, choose_device, choose_dtype

logger = logging.getLogger(__name__)


def load_policy(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    own_attention: bool = False,
    use_liger_kernel: bool | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[Policy, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer from a folder, the hub or a GGUF file."""
    tokenizer = tokenizer or load_tokenizer(path, trust_remote_code)
    model = load_model(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    policy = prepare(model, gradient_checkpointing, own_attention)
    apply_liger(model, use_liger_kernel)
    check_vocabulary(policy, tokenizer)
    return policy, tokenizer


def policy_and_tokenizer(
    model: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: Any
) -> tuple[Policy, PreTrainedTokenizerBase]:
    """Load or take over the model that a trainer trains, on its device and in its precision."""
    own_attention = config.rollout_backend == "hf"
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
        )
    if tokenizer is None and not model.config._name_or_path:
        raise ValueError("a model made in memory has no tokenizer to load; pass processing_class")
    _refuse_quantized(model)
    device = choose_device(config.device)
    cast(model.to(device), choose_dtype(config.dtype, device))
    policy = prepare(model, config.gradient_checkpointing, own_attention)
    apply_liger(model, config.use_liger_kernel)
    tokenizer = tokenizer or load_tokenizer(model.config._name_or_path, config.trust_remote_code)
    check_vocabulary(policy, tokenizer)
    return policy, tokenizer


def load_model(
    path: str | Path, *, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False
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
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
            **unpacked(gguf),
        )
    _check_weights(path, model, report)
    model.name_or_path = model.config.name_or_path = str(path)  # not the folder of a GGUF file, as transformers notes
    return model.to(device)


def _check_weights(path, model, report):
    """Refuse a model whose weights are not those that its config describes. `report` is transformers' loading info."""
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
    check_tokenizer_files(path)
    source, gguf = source_of(path)
    with loading(path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **gguf)
    if gguf:
        set_special_tokens(tokenizer)
    return tokenizer


def stop_token_ids(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Find the ids that end a completion: the tokenizer's end token and those of the model's generation config.

    Ids that no token of the model has end nothing and are left out with a warning: transformers puts the end token of
    the full-sized model into the generation config of a small one whose config names none.
    """
    model, count = policy.module, policy.module.get_input_embeddings().weight.shape[0]
    configured = model.generation_config.eos_token_id if model.generation_config else None
    configured = check_end_ids("eos_token_id of the model's generation config", configured)
    ids = sorted({*configured, tokenizer.eos_token_id} - {None})
    stops = tuple(token for token in ids if token < count)
    beyond = f"end tokens {ids[len(stops) :]}, but the model has {count} tokens alone"
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
    """Refuse a tokenizer that knows more tokens than the policy has embeddings."""
    embeddings = policy.module.get_input_embeddings().weight.shape[0]
    if tokenizer.vocab_size > embeddings:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding only {embeddings}; use the "
            "tokenizer that the model was trained with"
        )


def _refuse_quantized(model):
    """Refuse a model with quantized weights; casting them would spoil them."""
    if getattr(model, "is_quantized", False):
        name = type(model).__name__
        raise ValueError(f"{name} has quantized weights, and training needs plain ones; load it without quantization")


def prepare(model: PreTrainedModel, gradient_checkpointing: bool = False, own_attention: bool = False) -> Policy:
    """Make a policy of a model. Dropout is switched off, and a model that would be computed wrongly is refused."""
    name = type(model).__name__
    if model.get_output_embeddings() is None or model.config.is_encoder_decoder:
        raise ValueError(f"{name} is no causal LM; load the model with AutoModelForCausalLM")
    if model.base_model is model:  # as Llama 4's text model, whose prefix is that of the model for images
        raise ValueError(f"{name}: there is no {model.base_model_prefix!r} in it, whose states the head would take")
    _refuse_quantized(model)
    for knob in ("logits_scaling", "logit_scale"):
        if getattr(model.config, knob, 1) not in (1, None):
            raise ValueError(
                f"{name}: config.{knob}={getattr(model.config, knob)} changes the head, which is not supported"
            )
    obstacle, grouped = dry_run(model)
    if obstacle and not own_attention:
        raise Unfit(obstacle, name)
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # transformers' SDPA leaves the cap out
    for module in model.modules():  # the policy that is trained must be the policy that drew the samples
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for knob, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in knob or knob in ("layerdrop", "router_jitter_noise")):
                setattr(module, knob, 0.0)
    model.eval()
    _check_generation_config(model)
    if gradient_checkpointing:
        # In the backward pass the layers run again, outside of `Policy.states`, and must use the same attention.
        def contexts():
            return nullcontext(), attention_of(model, model.config._attn_implementation)

        settings = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
        model.gradient_checkpointing_enable(settings)
    else:
        model.gradient_checkpointing_disable()
    needed = (obstacle or narrow_window(model.config.get_text_config())) is not None
    return Policy(model, own_attention and needed, None if obstacle else grouped)


def _check_generation_config(model):
    """Repair or refuse a generation config that contradicts itself.

    transformers loads such a config, but would refuse to save it with the first checkpoint.
    """
    config = model.generation_config
    try:
        if config is not None:
            config.validate(strict=True)
    except ValueError:
        config.do_sample = True  # its sampling settings say so
        try:
            config.validate(strict=True)
        except ValueError as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"the model's generation_config.json could not be saved again; correct it: {reason}"
            ) from None
        logger.warning(
            "the model's generation_config.json has sampling settings but no do_sample; checkpoints get do_sample=True"
        )


def read_weights(policy: Policy, path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a checkpoint folder."""
    if has_adapters(policy.module):
        return read_adapters(path)
    module = policy.module
    with loading(path, "weights"):
        model, report = type(module).from_pretrained(
            path,
            config=module.config,  # what the checkpoint's own config.json says of its implementation is not read
            dtype=policy.dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_weights(path, model, report)
    return model.state_dict()
