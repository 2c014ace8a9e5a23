"""Attention over packed tokens, registered with transformers: one function, whatever the model.

transformers hands every layer's queries, keys and values to the function named by the config, and passes unknown
keyword arguments through. Ours forwards them to the `context` of the call: `PackedAttention` for training, the
rollout's own contexts for prefill and decode. No model is rewritten.

Shapes: N packed tokens, S sequences, T longest sequence, H query heads, K key heads, d head width.
"""

from contextlib import contextmanager

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

NAME = "fastgrpo"


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, context=None, sliding_window=None,
               softcap=None, s_aux=None, **kwargs):  # fmt: skip
    """transformers' attention signature: query [1, H, N, d], key and value [1, K, N, d] -> ([1, N, H, d], None)."""
    model = type(module).__name__
    if context is None:
        raise ValueError(f"{model}: the fastgrpo attention was called without a context; use model.hidden_states")
    if s_aux is not None:
        raise ValueError(f"{model}: attention sinks are not supported; choose a model without them")
    if softcap is not None:
        raise ValueError(f"{model}: soft-capped attention is not supported; choose a model without it")
    if sliding_window is not None and context.longest > sliding_window:
        raise ValueError(
            f"{model}: a sequence of {context.longest} tokens exceeds the sliding window of {sliding_window}, which is "
            "not supported; shorten prompts and completions to fit, or choose a model with full attention"
        )
    return context.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


# No mask function of this name is registered: then transformers makes no mask (and looks at no position, which would
# wait for the device); the context knows what attends to what.
AttentionInterface.register(NAME, _attention)


@contextmanager
def attention_of(model, name=NAME):
    """The model attends through the function of this name inside, and as before outside (its own `generate` keeps
    working)."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


class PackedAttention:
    """Causal attention within each of the sequences packed side by side, forward and backward.

    Sequences are laid out right-padded for the call alone: under a causal mask no token sees the padding behind it,
    so no mask is needed and SDPA keeps its flash path.
    """

    def __init__(self, lengths, device):
        """lengths: tokens of each sequence, on the host; they add up to N."""
        self.longest = max(lengths)
        lengths = torch.tensor(lengths)
        starts = lengths.cumsum(0) - lengths
        offsets = torch.arange(self.longest)
        # [S, T] row of each padded place; places behind the end repeat the last row and are never read back.
        padded = starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
        self.padded = padded.to(device)
        self.packed = (offsets < lengths[:, None]).flatten().nonzero()[:, 0].to(device)  # [N] among S * T

    def pad(self, tensor):
        """[heads, N, d] -> [S, heads, T, d]."""
        return tensor[:, self.padded].transpose(0, 1)

    def attend(self, layer, query, key, value, scaling):
        """query [H, N, d], key and value [K, N, d] -> [N, H, d]."""
        return self.attend_padded(self.pad(query), self.pad(key), self.pad(value), scaling)

    def attend_padded(self, query, key, value, scaling):
        """query [S, H, T, d], key and value [S, K, T, d] -> [N, H, d]."""
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)[self.packed]
