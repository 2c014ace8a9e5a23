"""Attention over packed tokens, by one function registered with transformers for all models.

transformers calls the function named in the model's config with the queries, keys and values of each layer, and passes
unknown keyword arguments through. One of these is our `context`, which gets the queries, keys and values: a
`PackedAttention` in training, and one of the two contexts of `rollout/attention.py` in generation. No model is
rewritten.

Shapes: N packed tokens, H query heads, K key heads, d head width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, PreTrainedModel

from fastgrpo.policy.varlen import Segments, VarlenAttention

NAME = "fastgrpo"


class Unfit(ValueError):
    """Packed attention does not support a model."""

    def __init__(self, obstacle: str, subject: str = "the model") -> None:
        remedy = "use --rollout_backend hf, which also trains with the model's own attention"
        super().__init__(f"{subject} {obstacle}: {remedy}")
        self.obstacle = obstacle


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, context=None, sliding_window=None,
               softcap=None, s_aux=None, **kwargs):  # fmt: skip
    """Call the context's attention, with the signature of transformers' attention functions.

    The query is [1, H, N, d], key and value are [1, K, N, d]. The result is ([1, N, H, d], None).
    """
    model = type(module).__name__
    if context is None:
        raise Unfit("does not pass keyword arguments on to its attention", model)
    if s_aux is not None:
        raise Unfit("has attention sinks", model)
    if softcap is not None:
        raise Unfit("has soft-capped attention", model)
    if attention_mask is not None:
        raise Unfit("has a custom attention mask", model)
    if not getattr(module, "is_causal", True):
        raise Unfit("lets tokens attend to later ones", model)
    if sliding_window is not None and context.longest > sliding_window:
        raise ValueError(
            f"{model}: a sequence of {context.longest} tokens exceeds the sliding window of {sliding_window}, which is "
            "not supported; shorten prompts and completions to fit, or use --rollout_backend hf"
        )
    return context.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


# No mask function is registered under this name, so transformers builds no mask and does not read the positions, which
# would be a sync. The context defines the tokens that each token attends to.
AttentionInterface.register(NAME, _attention)


@contextmanager
def attention_of(model: PreTrainedModel, name: str = NAME) -> Iterator[None]:
    """Use a registered attention function for the model within the context.

    Afterwards its own attention is restored, so that `generate` keeps working. Within the context it has no padding
    token: GPT-2 would search the ids for it, which is a sync.
    """
    config, text = model.config, model.config.get_text_config()
    before, padding = config._attn_implementation, getattr(text, "pad_token_id", None)
    config._attn_implementation = name
    if padding is not None:
        vars(text)["pad_token_id"] = None  # without the validation of a config that needs an integer
    try:
        yield
    finally:
        config._attn_implementation = before
        if padding is not None:
            vars(text)["pad_token_id"] = padding


class PackedAttention:
    """Causal attention within each sequence of a pack, forward and backward, without padding.

    Some of the sequences may be prompts that several completions share. The order of the packed tokens is then: the
    shared prompts; their branches (the completions of the first prompt, those of the second, and so on), each of which
    attends to its prompt and to itself; all other sequences. A branch costs only its own tokens. Its result equals that
    of prompt and branch in one sequence, up to rounding, because it is one softmax over the keys of both.
    """

    def __init__(self, lengths: list[int], device: torch.device | str, branches: Sequence[Sequence[int]] = ()) -> None:
        prompts = lengths[: len(branches)]
        self.longest = max([*lengths, *(p + max(own) for p, own in zip(prompts, branches, strict=True))])
        self.parts = [Segments(lengths, lengths, device, causal=True)]
        if branches:
            start, of_each = sum(prompts), [sum(own) for own in branches]
            spans = {"query_span": slice(start, start + sum(of_each)), "key_span": slice(0, start)}
            self.parts.append(Segments(of_each, prompts, device, causal=False, **spans))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attend in one layer: query [H, N, d], key and value [K, N, d] -> [N, H, d] in the dtype of the query."""
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        return VarlenAttention.apply(query, key, value, self.parts, scaling)
