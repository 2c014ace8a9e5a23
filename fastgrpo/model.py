"""The policy: loading, and token ids -> hidden states. Logits are never made here; the head belongs to the loss."""

from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

from fastgrpo.attention import PackedAttention, attention_of


def choose_device(name="auto"):
    """ "auto" is the GPU where there is one. Raises ValueError for a CUDA device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r} was asked for, but torch sees no CUDA device; use --device cpu")
    return device


def choose_dtype(name, device):
    """ "auto" is bf16 on GPUs, where the optimizer keeps fp32 masters, and fp32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def load_policy(path, *, dtype="auto", device="auto", gradient_checkpointing=False):
    """A causal LM and its tokenizer from a folder or the hub.

    Returns:
        (model, tokenizer), the model ready for training: see `prepare`.

    Raises:
        ValueError: a model that the engine cannot run exactly.
    """
    device = choose_device(device)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=choose_dtype(dtype, device)).to(device)
    return prepare(model, gradient_checkpointing), AutoTokenizer.from_pretrained(path)


def cast(model, dtype):
    """Cast the weights, and only them: a rotary embedding's frequencies in bf16 would be wrong by radians."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def prepare(model, gradient_checkpointing=False):
    """Switch dropout off, gradient checkpointing as told, and refuse what would be silently wrong."""
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not use transformers' attention interface; choose a model that does")
    for knob, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1), ("logit_scale", 1)):
        if getattr(model.config, knob, neutral) not in (neutral, None):
            raise ValueError(f"{name}: config.{knob}={getattr(model.config, knob)} changes the head; not supported")
    layer_types = set(getattr(model.config, "layer_types", None) or ())
    if layer_types - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{name} has layers that are not attention ({', '.join(sorted(layer_types))}); not supported")
    for module in model.modules():  # the policy that is trained must be the policy that drew the samples
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for knob, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in knob or knob in ("layerdrop", "router_jitter_noise")):
                setattr(module, knob, 0.0)
    model.eval()
    if gradient_checkpointing:
        # The layers run a second time in the backward pass, outside of `hidden_states`: they must attend as they did.
        def contexts():
            return nullcontext(), attention_of(model, model.config._attn_implementation)

        settings = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
        model.gradient_checkpointing_enable(settings)
    else:
        model.gradient_checkpointing_disable()
    return model


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
    for layer in model.base_model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = torch.is_grad_enabled()  # checkpointing looks at it, and costs where there is no backward
    with attention_of(model):
        out = model.base_model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, context=context
        )
    return out.last_hidden_state[0]


def completion_states(model, batch):
    """Batch -> [M, D]: the hidden states that predict its completion tokens."""
    context = PackedAttention(batch.lengths, batch.input_ids.device)
    return hidden_states(model, batch.input_ids, batch.position_ids, context)[batch.rows]
