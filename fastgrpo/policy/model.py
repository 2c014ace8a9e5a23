"""The policy: loading, with checks, and token ids -> hidden states. Logits are never made here; the head belongs to the
loss."""

import logging
from contextlib import contextmanager, nullcontext

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from fastgrpo.policy.attention import PackedAttention, attention_of
from fastgrpo.policy.own_attention import narrow_window, packing_obstacle, padded_states

logger = logging.getLogger(__name__)


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
