"""A saved model says the same under the names of transformers 4 and 5, and transformers 5 reads it as before."""

import json

import pytest
import tiny
from transformers import AutoConfig, AutoTokenizer, Gemma3TextConfig, LlamaConfig, Phi3Config, PhiConfig

from fastgrpo.run.older_names import add_older_names, older_config, older_tokenizer

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS = {
    "default": tiny.config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "scaled": LlamaConfig(rope_parameters=LLAMA3),
    "partial": PhiConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.25}),
    "a length of its own": Phi3Config(),
    "by layer": Gemma3TextConfig(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_the_same_config(name, tmp_path):
    """With the older names beside the new ones, and from the older names alone."""
    CONFIGS[name].save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    add_older_names(tmp_path)
    after = AutoConfig.from_pretrained(tmp_path).to_dict()
    for held in (before, after):
        held.pop("partial_rotary_factor", None)  # the rotary parameters hold it too, and count
    assert after == before
    if name != "by layer":
        held = json.loads((tmp_path / "config.json").read_text())
        rope = held.pop("rope_parameters")
        assert held["rope_theta"] == rope["rope_theta"]
        (tmp_path / "config.json").write_text(json.dumps(held))
        assert AutoConfig.from_pretrained(tmp_path).rope_parameters == before["rope_parameters"]


def test_the_names_that_transformers_4_reads():
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    assert older_config({"dtype": "bfloat16", "rope_parameters": rope}) == {
        "dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_parameters": rope, "rope_theta": 1e6,
    }  # fmt: skip
    scaled = older_config({"rope_parameters": LLAMA3})
    assert scaled["rope_scaling"] == {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    for config in ({}, {"rope_parameters": None}, {"rope_parameters": {"full_attention": rope}}, {"rope_theta": 7}):
        assert older_config(config) == config


def test_the_tokenizer_keeps_its_extra_tokens(tmp_path):
    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>", "</tool>"]})
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "TokenizersBackend"
    add_older_names(tmp_path)
    held = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert held["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert held["additional_special_tokens"] == ["<tool>", "</tool>"] and "extra_special_tokens" not in held
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.extra_special_tokens == tokenizer.extra_special_tokens == ["<tool>", "</tool>"]
    text = "<tool>1+1</tool> hello<eos>"
    assert again(text).input_ids == tokenizer(text).input_ids and again.chat_template == tiny.CHAT_TEMPLATE
    assert again.eos_token_id == 1 and again.all_special_ids == tokenizer.all_special_ids


def test_other_tokenizers_stay_as_they_are():
    for config in ({"tokenizer_class": "Qwen2Tokenizer"}, {"extra_special_tokens": {"image": "<i>"}}):
        assert older_tokenizer(config) == config


def test_a_folder_without_a_config_is_left_alone(tmp_path):
    add_older_names(tmp_path)
    assert not list(tmp_path.iterdir())
