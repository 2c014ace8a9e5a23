"""Attention over packed tokens, registered with transformers: one function, whatever the model.

transformers hands every layer's queries, keys and values to the function named by the config, and passes unknown
keyword arguments through. Ours forwards them to the `context` of the call: `PackedAttention` for training, the
rollout's own contexts for prefill and decode. No model is rewritten.

Shapes: N packed tokens, H query heads, K key heads, d head width.
"""

from contextlib import contextmanager

from transformers import AttentionInterface

from fastgrpo.policy.varlen import Segments, VarlenAttention

NAME = "fastgrpo"


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, context=None, sliding_window=None,
               softcap=None, s_aux=None, **kwargs):  # fmt: skip
    """transformers' attention signature: query [1, H, N, d], key and value [1, K, N, d] -> ([1, N, H, d], None)."""
    model = type(module).__name__
    if context is None:
        raise ValueError(f"{model}: the fastgrpo attention was called without a context; use Policy.states")
    if s_aux is not None:
        raise ValueError(f"{model}: attention sinks are not supported; use --rollout_backend hf")
    if softcap is not None:
        raise ValueError(f"{model}: soft-capped attention is not supported; use --rollout_backend hf")
    if sliding_window is not None and context.longest > sliding_window:
        raise ValueError(
            f"{model}: a sequence of {context.longest} tokens exceeds the sliding window of {sliding_window}, which is "
            "not supported; shorten prompts and completions to fit, or use --rollout_backend hf"
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
    """Causal attention within each of the sequences packed side by side, forward and backward, without padding.

    Some of them may be prompts that others share. Rows then stand in this order: the shared prompts; their branches
    (the completions of the first prompt, those of the second, ...), which attend to their prompt and to themselves;
    all other sequences. A branch costs its own tokens alone, and what it computes is what prompt and branch in one
    sequence would, up to rounding: one softmax over the prompt's keys and its own.
    """

    def __init__(self, lengths, device, branches=()):
        """lengths: tokens of each sequence in the order above, on the host; they add up to N.
        branches: of each shared prompt, the lengths of its branches."""
        prompts = lengths[: len(branches)]
        self.longest = max([*lengths, *(p + max(own) for p, own in zip(prompts, branches, strict=True))])
        self.parts = [Segments(lengths, lengths, device, causal=True)]
        if branches:
            start, of_each = sum(prompts), [sum(own) for own in branches]
            rows = slice(start, start + sum(of_each))
            self.parts.append(Segments(of_each, prompts, device, causal=False, rows=rows, key_rows=slice(0, start)))

    def attend(self, layer, query, key, value, scaling):
        """query [H, N, d], key and value [K, N, d] -> [N, H, d]."""
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        return VarlenAttention.apply(query, key, value, self.parts, scaling)
