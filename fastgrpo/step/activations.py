"""The memory of a micro-batch's activations, computed from the architecture.

Autograd keeps, for each token and layer, with b bytes a number of the weights' dtype:

    2 norms                4 h + 2 b h + 4 each: the input in fp32, what is scaled, what goes into the products, 1 / rms
    attention              b (2 H d + 2 K d) + 4 H: queries and output, keys and values, the log-sum-exps
    MLP                    4 b f: gate, its silu, up, and their product
    norms of q and k       (4 + b) (H + K) d + 4 (H + K), where the model has them

liger-kernel's layers keep 2 b h + 4 of a norm, b (H + K) d of the norms of q and k, and 3 b f of the MLP. A mixture of
experts computes each token in k of them: f is then k times the width of one, and 2 b k h are added for their inputs and
outputs. With gradient checkpointing each layer keeps only its input, b h.

Until the layers go backward, the last norm and the head hold (4 + b) h + (4 + b) h: the norm's, and the head's hidden
states with their fp32 gradient. Frozen layers below adapters keep less than this.

After that, one layer at a time holds b (3 f + 2 h) + 8 h for its gradients. With gradient checkpointing that layer is
computed again, and keeps for as long what is listed above.

Shapes: h hidden size, H query heads, K key heads, d head width, f width of the MLP.
"""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from fastgrpo.policy.model import head_dim


class Activations(NamedTuple):
    """The memory of one micro-batch's activations.

    Attributes:
        kept: Bytes that the layers keep for the backward pass.
        ends: Bytes that the last norm and the head hold until the layers go backward.
        backward: Bytes that the backward pass of one layer adds.
    """

    kept: int
    ends: int
    backward: int


def activation_bytes(
    model: PreTrainedModel, dtype: torch.dtype, tokens: int, *, checkpointing: bool, fused: bool = False
) -> Activations:
    """Compute the memory that the forward and backward pass over one micro-batch takes at its peak."""
    config, b = model.config.get_text_config(), dtype.itemsize
    h, layer = config.hidden_size, _layer_bytes(model, b, fused)
    kept = config.num_hidden_layers * (b * h if checkpointing else layer)
    backward = b * (3 * _mlp_width(config)[0] + 2 * h) + 8 * h + layer * checkpointing
    return Activations(tokens * kept, tokens * 2 * (4 + b) * h, tokens * backward)


def _layer_bytes(model, b, fused):
    """Count the bytes that autograd keeps of one token in one layer."""
    config = model.config.get_text_config()
    h, heads, d = config.hidden_size, config.num_attention_heads, head_dim(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    f, experts = _mlp_width(config)
    norms = 2 * ((0 if fused else 4 * h) + 2 * b * h + 4)
    attention = b * (2 * heads * d + 2 * kv_heads * d) + 4 * heads
    mlp = (3 if fused else 4) * b * f + 2 * b * experts * h
    if any(name.endswith(".q_norm") for name, _ in model.named_modules()):
        norms += (b if fused else 4 + b) * (heads + kv_heads) * d + 4 * (heads + kv_heads)
    return norms + attention + mlp


def _mlp_width(config):
    """Return f, summed over the experts that compute a token, and how many these are (0 without experts).

    Configs name the width in several ways; one that names none has 4 h, as GPT-2's.
    """
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    width = next((getattr(config, name) for name in names if getattr(config, name, None)), 4 * config.hidden_size)
    experts = getattr(config, "num_experts_per_tok", None) or 0
    if not experts:
        return width, 0
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return experts * (getattr(config, "moe_intermediate_size", None) or width) + shared, experts
