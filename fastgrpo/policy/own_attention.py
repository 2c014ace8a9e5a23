"""Training of models that packed attention cannot run, by their own attention over padded sequences.

The result is exact, because each token sees what it would see if its sequence stood alone. (Models whose rotary
frequencies follow the longest sequence of a batch are the exception.) It is slower than packed attention: the padding
is computed too, and so is a prompt for each of its completions.
"""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from fastgrpo.loss.staging import to_device
from fastgrpo.policy.batch import Batch


def narrow_window(config: PretrainedConfig) -> int | None:
    """Find the sliding window of a model, if some layers use one that is shorter than the context."""
    window = getattr(config, "sliding_window", None)
    used = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    context = getattr(config, "max_position_embeddings", None)
    return window if used and window is not None and (context is None or window < context) else None


def padded_states(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Compute the hidden states of a packed batch by the model's own attention over padded sequences.

    Each branch of a shared prompt stands behind a copy of that prompt. The padding is on the right, where no token sees
    it.

    Returns:
        [N, D] final hidden states in the model's dtype.
    """
    spans = torch.arange(len(batch.input_ids)).split(batch.lengths)
    prompts, rest = spans[: len(batch.branches)], iter(spans[len(batch.branches) :])
    rows = [torch.cat([prompt, next(rest)]) for prompt, own in zip(prompts, batch.branches, strict=True) for _ in own]
    rows = pad_sequence([*rows, *rest], batch_first=True, padding_value=-1)  # [S, T] indices of packed tokens
    place = torch.empty(len(batch.input_ids), dtype=torch.int64)  # [N] index of each packed token among the S * T
    place[rows[rows >= 0]] = (rows >= 0).flatten().nonzero()[:, 0]  # a prompt's token is read from any of its copies
    ids = batch.input_ids[to_device(rows.clamp(min=0), batch.input_ids.device)]
    # The mask hides nothing. Without one, transformers would look for several sequences packed into one.
    out = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return out.last_hidden_state.flatten(0, 1)[to_device(place, ids.device)]
