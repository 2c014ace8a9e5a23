"""Loading a policy and its tokenizer, with checks that name what does not fit."""

from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fastgrpo.policy.model import cast, prepare


def choose_device(name="auto"):
    """ "auto" is the GPU where there is one. Raises ValueError for a CUDA device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be cuda, cuda:N, cpu or auto, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r} was asked for, but torch sees no CUDA device; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA device(s)")
    return device


def choose_dtype(name, device):
    """ "auto" is bf16 on GPUs, where the optimizer keeps fp32 masters, and fp32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def load_policy(path, *, dtype="auto", device="auto", gradient_checkpointing=False, trust_remote_code=False,
                own_attention=False):  # fmt: skip
    """A causal LM and its tokenizer from a folder or the hub.

    Returns:
        (model, tokenizer), the model ready for training: see `prepare`.

    Raises:
        ValueError: it cannot be loaded, or the engine cannot run it exactly.
    """
    tokenizer = load_tokenizer(path, trust_remote_code)
    model = load_model(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    return prepare(model, gradient_checkpointing, own_attention), tokenizer


def policy_and_tokenizer(model, tokenizer, config):
    """What a trainer trains, on its device and in its precision.

    Args:
        model: a folder or hub id, or a transformers causal LM, which is changed in place. tokenizer: None loads the
            model's. config: `GRPOConfig`.

    Returns:
        (model, tokenizer), which fit each other.

    Raises:
        ValueError: as `load_policy`, `prepare` and `check_vocabulary`; a model made in memory without a tokenizer.
    """
    if not isinstance(model, PreTrainedModel):
        policy, own = load_policy(
            model,
            dtype=config.dtype,
            device=config.device,
            gradient_checkpointing=config.gradient_checkpointing,
            trust_remote_code=config.trust_remote_code,
            own_attention=config.rollout_backend == "hf",
        )
        tokenizer = tokenizer or own
    else:
        if tokenizer is None and not model.config._name_or_path:
            raise ValueError("a model made in memory has no tokenizer to load; pass processing_class")
        device = choose_device(config.device)
        policy = prepare(
            cast(model.to(device), choose_dtype(config.dtype, device)),
            config.gradient_checkpointing,
            own_attention=config.rollout_backend == "hf",
        )
        tokenizer = tokenizer or load_tokenizer(model.config._name_or_path, config.trust_remote_code)
    check_vocabulary(policy, tokenizer)
    return policy, tokenizer


def load_model(path, *, dtype="auto", device="auto", trust_remote_code=False):
    """A causal LM from a folder or the hub. Raises ValueError where it is not there, damaged or not complete."""
    device = choose_device(device)
    with _loading(path, "model"):
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=choose_dtype(dtype, device),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise ValueError(
            f"model {str(path)!r} lacks {len(names)} of its weights ({names[0]}, ...): they would be random; is the "
            "folder whole, and is it a causal LM?"
        )
    return model.to(device)


def load_tokenizer(path, trust_remote_code=False):
    """The tokenizer of a folder or hub id. Raises ValueError where it cannot be loaded."""
    with _loading(path, "tokenizer"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


@contextmanager
def _loading(path, what):
    """transformers' many ways to say that a model cannot be loaded, as one: a ValueError that names it."""
    path = str(path)
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).is_dir():
        raise ValueError(f"no such model folder: {path}")
    try:
        yield
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        refuse_code(path, error)
        reason = " ".join(str(error).split())[:300]
        remedy = "the files may be damaged or incomplete" if Path(path).is_dir() else "name a folder or a hub id"
        raise ValueError(f"the {what} of {path!r} cannot be loaded ({remedy}): {reason}") from error


def refuse_code(path, error):
    """Raises ValueError with the remedy where transformers' error says that the model comes with code of its own."""
    if "trust_remote_code" in str(error):
        raise ValueError(
            f"{str(path)!r} comes with Python code of its own, which is not run unasked; read it, then pass "
            "--trust_remote_code True"
        ) from error


def stop_token_ids(model, tokenizer):
    """The ids that end a completion: the tokenizer's end token and those of the model's generation config.

    Raises:
        ValueError: there are none.
    """
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ValueError(
            "the tokenizer has no end token, so no completion could end; set eos_token in tokenizer_config.json or "
            "eos_token_id in generation_config.json"
        )
    return tuple(sorted(ids))


def check_vocabulary(model, tokenizer):
    """Raises ValueError where the tokenizer knows more tokens than the model has embeddings."""
    embeddings = model.get_input_embeddings().weight.shape[0]
    if tokenizer.vocab_size > embeddings:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding only {embeddings}; use the "
            "tokenizer that the model was trained with"
        )
