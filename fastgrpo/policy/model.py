"""The policy: loading, with checks, and token ids -> hidden states. Logits are never made here; the head belongs to the
loss."""

import logging
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fastgrpo.policy.attention import PackedAttention, attention_of
from fastgrpo.policy.own_attention import narrow_window, packing_obstacle, padded_states

logger = logging.getLogger(__name__)


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


def cast(model, dtype):
    """Cast the weights, and only them: a rotary embedding's frequencies in bf16 would be wrong by radians."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def prepare(model, gradient_checkpointing=False, own_attention=False):
    """Switch dropout off, gradient checkpointing as told, and refuse what would be silently wrong.

    own_attention: a model that packed attention cannot run is not refused: it trains by its own, over padded sequences.
    """
    name, obstacle = type(model).__name__, packing_obstacle(model)
    for knob, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1), ("logit_scale", 1)):
        if getattr(model.config, knob, neutral) not in (neutral, None):
            raise ValueError(f"{name}: config.{knob}={getattr(model.config, knob)} changes the head; not supported")
    if obstacle and not own_attention:
        raise ValueError(f"{name} {obstacle}: use --rollout_backend hf, which trains by its own attention, too")
    model.own_attention = own_attention and (obstacle or narrow_window(model.config)) is not None
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.config._attn_implementation = "eager"  # transformers' SDPA leaves the cap out
    for module in model.modules():  # the policy that is trained must be the policy that drew the samples
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for knob, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in knob or knob in ("layerdrop", "router_jitter_noise")):
                setattr(module, knob, 0.0)
    model.eval()
    _check_generation_config(model)
    if gradient_checkpointing:
        # The layers run a second time in the backward pass, outside of `hidden_states`: they must attend as they did.
        def contexts():
            return nullcontext(), attention_of(model, model.config._attn_implementation)

        settings = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
        model.gradient_checkpointing_enable(settings)
    else:
        model.gradient_checkpointing_disable()
    return model


def _check_generation_config(model):
    """transformers loads a generation config that contradicts itself, and refuses to save it: not at the first
    checkpoint."""
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
                f"the model's generation_config.json could not be saved again, mend it: {reason}"
            ) from None
        logger.warning("the model's generation_config.json samples without do_sample: what is saved has do_sample=True")


def head(model):
    """(weight [V, D], bias [V] or None) of the language-model head."""
    layer = model.get_output_embeddings()
    return layer.weight, layer.bias


def hidden_states(model, input_ids, position_ids, context):
    """Packed tokens through the layers.

    Args:
        input_ids, position_ids: [N] int64. context: who attends to whom: an object like `PackedAttention`.

    Returns:
        [N, D] final hidden states, in the model's dtype.
    """
    with attention_of(model), _checkpointing(model):
        out = model.base_model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, context=context
        )
    return out.last_hidden_state[0]


@contextmanager
def _checkpointing(model):
    """Layers look at `training`: inside they are checkpointed where there will be a backward, which costs elsewhere."""
    layers = []
    if torch.is_grad_enabled():
        layers = [layer for layer in model.base_model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def fp32_logits(model, states):
    """[R, D] -> [R, V] fp32, also from 16-bit states: a rounded logit is a wrong log-prob."""
    weight, bias = head(model)
    if states.dtype in (torch.float32, torch.float64):
        logits = (states @ weight.T).float()
    elif states.is_cuda:
        logits = torch.mm(states, weight.T, out_dtype=torch.float32)
    else:
        logits = states.float() @ weight.float().T
    return logits if bias is None else logits + bias.float()


def completion_states(model, batch):
    """Batch -> [M, D]: the hidden states that predict its completion tokens."""
    if getattr(model, "own_attention", False):
        with _checkpointing(model):
            return padded_states(model, batch)[batch.rows]
    context = PackedAttention(batch.lengths, batch.input_ids.device, batch.branches)
    return hidden_states(model, batch.input_ids, batch.position_ids, context)[batch.rows]
