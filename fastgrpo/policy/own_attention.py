"""Models that packed attention cannot run, and their training by their own attention over padded sequences.

Exact, as each token sees what it would see alone (but for rotary frequencies that follow the longest of a batch), and
slower: padding is computed, and so is a prompt for each of its completions.
"""

import torch
from torch.nn.utils.rnn import pad_sequence


def packing_obstacle(model):
    """Why packed attention cannot compute what this model does, or None. A sliding window is looked at when a sequence
    reaches beyond it."""
    config = model.config
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    rope = getattr(config, "rope_parameters", None) or {}
    if not getattr(model, "_supports_attention_backend", False):
        return "does not use transformers' attention interface"
    if layer_types:
        return f"has layers that are not plain attention ({', '.join(sorted(layer_types))})"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "has soft-capped attention"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "has attention sinks"
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return f"has {rope['rope_type']} rotary frequencies, which follow the longest sequence of a batch"
    return None


def narrow_window(config):
    """The sliding window of some of the layers, where it is shorter than the context; or None."""
    window = getattr(config, "sliding_window", None)
    used = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    return window if used and window is not None and window < config.max_position_embeddings else None


def padded_states(model, batch):
    """Batch -> [N, D], by the model's own attention over S sequences that are padded on the right, where no token sees
    it; each branch stands behind a copy of its prompt."""
    spans = torch.arange(len(batch.input_ids)).split(batch.lengths)
    prompts, rest = spans[: len(batch.branches)], iter(spans[len(batch.branches) :])
    rows = [torch.cat([prompt, next(rest)]) for prompt, own in zip(prompts, batch.branches, strict=True) for _ in own]
    rows = pad_sequence([*rows, *rest], batch_first=True, padding_value=-1)  # [S, T], which packed token stands there
    place = torch.empty(len(batch.input_ids), dtype=torch.int64)  # of the N among the S * T
    place[rows[rows >= 0]] = (rows >= 0).flatten().nonzero()[:, 0]  # a prompt's: in any of its copies
    ids = batch.input_ids[rows.clamp(min=0).to(batch.input_ids.device)]
    # A mask that hides nothing: without any, transformers would look for sequences packed in a row.
    out = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return out.last_hidden_state.flatten(0, 1)[place.to(ids.device)]
