"""TRL's generation_kwargs: what has a setting becomes it, what changes nothing is taken, the rest is refused."""

import json

import pytest
from transformers import GenerationConfig

from fastgrpo import GRPOConfig
from fastgrpo.config.trl import _DRAWS as SETTINGS
from fastgrpo.config.trl import _NEUTRAL as NEUTRAL
from fastgrpo.config.trl import _NO_DRAW as IDLE
from fastgrpo.config.trl import generation

OURS = {
    "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 64,
    "do_sample": True, "num_beams": 1, "use_cache": False, "pad_token_id": 3, "typical_p": None,
}  # fmt: skip


@pytest.mark.parametrize("form", [dict, json.dumps], ids=["dict", "JSON"])
def test_options_become_the_settings_of_the_same_meaning(form):
    settings = generation({"generation_kwargs": form(OURS), "beta": 0.1})
    assert settings == {
        "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
        "max_completion_length": 64,
    }  # fmt: skip
    config = GRPOConfig(**settings)
    assert config.max_completion_length == 64 and config.repetition_penalty == 1.1
    assert generation({"generation_kwargs": None}) == generation({"generation_kwargs": {}}) == {}
    assert generation({"generation_kwargs": {"top_k": None}}) == {}


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [("do_sample", False, "temperature"), ("num_beams", 4, "repetition_penalty set the draw"),
     ("num_return_sequences", 8, "num_generations"), ("eos_token_id", [5], "model.generation_config.eos_token_id"),
     ("stop_strings", ["\n"], "a completion ends at"), ("suppress_tokens", [3], "set the draw"),
     ("no_repeat_ngram_size", 2, "set the draw"), ("max_length", 100, "max_completion_length"), ("seed", 1, "seed")],
)  # fmt: skip
def test_other_options_are_refused_by_name(option, value, remedy):
    with pytest.raises(ValueError, match=f"^generation_kwargs has {option}=.*{remedy}"):
        generation({"generation_kwargs": {"top_k": 3, option: value}})


@pytest.mark.parametrize("given", ["top_k=3", "[1]", 7, ["top_k"]], ids=str)
def test_what_is_no_dict_is_refused(given):
    with pytest.raises(ValueError, match=r"^generation_kwargs must be a dictionary"):
        generation({"generation_kwargs": given})


def test_the_neutral_values_are_those_of_transformers():
    """Its default turns an option off; do_sample alone, which TRL turns on, does not."""
    theirs = GenerationConfig._get_default_generation_params()
    assert {name: theirs[name] for name in NEUTRAL.keys() & theirs.keys()} == {
        name: value for name, value in NEUTRAL.items() if name in theirs
    } | {"do_sample": False}
    of_vllm = {"n", "max_tokens", "presence_penalty", "frequency_penalty", "stop_token_ids", "stop", "seed"}
    assert {*SETTINGS, *IDLE, *NEUTRAL} - of_vllm <= set(vars(GenerationConfig()))
