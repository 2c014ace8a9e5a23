"""TRL's `generation_kwargs`: options of transformers' `generate`, as the settings of the same meaning.

Both rollout backends draw by temperature, filters and repetition penalty alone, so an option that asks for more is
refused by name. One whose value changes no draw is taken and does nothing.
"""

from collections.abc import Mapping
from typing import Any

from fastgrpo.config.fields import keywords

# The option -> our setting. The first group is transformers', the second vLLM's names of the same.
SETTINGS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
}
# Options that change no draw, whatever their value.
IDLE = ("use_cache", "cache_implementation", "disable_compile", "pad_token_id", "bos_token_id", "renormalize_logits")
# The option -> the value that changes no draw, beside None.
NEUTRAL = {
    "do_sample": True,
    "num_beams": 1,
    "num_return_sequences": 1,
    "n": 1,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_length": 0,
    "guidance_scale": 1.0,
}
_END = "write it into the model's generation_config (model.generation_config.eos_token_id), which ends completions here"
# The option -> what to do instead of it; the others get a line that holds for all.
INSTEAD = {
    "do_sample": "completions of a greedy group are all the same; leave it out",
    "num_return_sequences": "use num_generations",
    "n": "use num_generations",
    "max_length": "use max_completion_length, which counts the completion alone",
    "eos_token_id": _END,
    "stop_token_ids": _END,
    "stop_strings": "only tokens end a completion here: " + _END,
    "stop": "only tokens end a completion here: " + _END,
    "seed": "use the setting seed",
}


def generation(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Translate generation_kwargs, a dict or the JSON text of one."""
    settings = {}
    for name, value in keywords("generation_kwargs", stated["generation_kwargs"]).items():
        if name in SETTINGS:
            if value is not None:  # transformers' own default, which is ours
                settings[SETTINGS[name]] = value
        elif name not in IDLE and value is not None and not _is_neutral(name, value):
            remedy = INSTEAD.get(
                name, f"completions are drawn by {', '.join(list(SETTINGS)[:5])} alone, in both rollout backends"
            )
            raise ValueError(f"generation_kwargs has {name}={value!r}, which is not for fastgrpo; {remedy}")
    return settings


def _is_neutral(name, value):
    """Tell whether an option has the value that changes no draw. True is no number here, nor 1 a truth value."""
    return name in NEUTRAL and value == NEUTRAL[name] and isinstance(value, bool) == isinstance(NEUTRAL[name], bool)
