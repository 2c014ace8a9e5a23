"""Checkpoints in other programs: what vLLM, peft and transformers read in a folder."""

import json

import pytest
import runs
import tiny
import torch
import transformers
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from updates import rising

from fastgrpo.policy.load import prepare
from fastgrpo.policy.model import Policy
from fastgrpo.run.checkpoint import save_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trainers after a run, without adapters and with them."""
    lora = {"use_peft": True, "lora_target_modules": "all-linear"}
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastgrpo.run.curves.draw_curves", lambda *_: None)
        for name, settings in (("plain", {}), ("lora", lora)):
            folder, settings = tmp_path_factory.mktemp(name), settings | {"dtype": "bfloat16", "learning_rate": 1e-2}
            made[name] = runs.make_trainer(folder, rising, chat=True, **settings)
            made[name].train()
    return made


@pytest.fixture(params=["checkpoint", "merged"])
def folder(request, trained):
    """A folder that `vllm serve` takes: a checkpoint, or the merged model of a run with adapters."""
    paths = {"checkpoint": trained["plain"].log.dir / "checkpoint-2", "merged": trained["lora"].log.dir / "merged"}
    return paths[request.param]


def read(path):
    return json.loads(path.read_text())


def test_a_folder_is_a_model_of_its_architecture(folder):
    config = read(folder / "config.json")
    assert {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16"}.items() <= config.items()
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert not {"auto_map", "quantization_config", "attn_implementation", "_attn_implementation"} & set(config)
    assert [path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")] == ["model.safetensors"]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        held = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        assert weights.metadata() == {"format": "pt"}
        assert {part.get_dtype() for part in held.values()} == {"BF16"}
        expected = {name: list(value.shape) for name, value in tiny.model(vocab_size=258).state_dict().items()}
        assert {name: part.get_shape() for name, part in held.items()} == expected
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert (folder / "chat_template.jinja").read_text() == tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert ModelCard.load(folder / "README.md").data.library_name == "transformers"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id == 1


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LINEAR, LONG = {"rope_type": "linear", "factor": 8.0}, {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {  # by model: the frequencies of transformers 5, and what transformers 4 reads
    "Olmo3": ({"full_attention": {**YARN, "rope_theta": 5e5}, "sliding_attention": LOCAL},
              {"rope_theta": 5e5, "rope_scaling": YARN}),
    "Gemma3Text": ({"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": LOCAL},
                   {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR}),
    "Gemma4Text": ({"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                    "sliding_attention": LOCAL}, {}),
    "Phi3": ({**LONG, "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64},
             {"rope_theta": 1e4, "rope_scaling": {"type": "longrope", **LONG}}),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_configs_and_tokenizers_are_also_those_of_transformers_4(name, tmp_path):
    given, expected = ROPES[name]
    how = {**tiny.SHAPE, "rope_parameters": given, "original_max_position_embeddings": 64}
    config = getattr(transformers, f"{name}Config")(**how)
    model, tokenizer = AutoModelForCausalLM.from_config(config), tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>"]})
    save_model(tmp_path, model, tokenizer)
    found, again = read(tmp_path / "config.json"), transformers.AutoConfig.from_pretrained(tmp_path)
    assert expected.items() <= found.items() and again.rope_parameters | config.rope_parameters == again.rope_parameters
    found, again = read(tmp_path / "tokenizer_config.json"), AutoTokenizer.from_pretrained(tmp_path)
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast" and found["additional_special_tokens"] == ["<a>"]
    assert again.convert_tokens_to_ids("<a>") in again.all_special_ids
    if name == "Phi3":
        assert Policy(prepare(model, own_attention=True).module).context == 64  # beyond it, frequencies change


def logits(model):
    with torch.no_grad():
        return model.float().eval()(torch.tensor([[5, 9, 60, 33, 7]])).logits


def test_peft_loads_the_adapters(trained):
    run = trained["lora"].log.dir
    folder, start = run / "checkpoint-2", str(run.parent / "model")
    config = read(folder / "adapter_config.json")
    assert (config["peft_type"], config["task_type"], config["r"]) == ("LORA", "CAUSAL_LM", 16)
    assert config["base_model_name_or_path"] == start and isinstance(config["target_modules"], list)
    # What vLLM refuses in adapters.
    assert config["bias"] == "none" and not config["use_dora"] and config["modules_to_save"] is None
    with safe_open(folder / "adapter_model.safetensors", "pt") as weights:
        names = list(weights.keys())
    assert names and all(name.startswith("base_model.model.model.layers.") for name in names)
    assert {name.split(".")[-2] for name in names} == {"lora_A", "lora_B"}
    assert {name.split(".")[-3] for name in names} == {name.split(".")[-1] for name in config["target_modules"]}
    expected = logits(AutoModelForCausalLM.from_pretrained(run / "merged", dtype="auto"))
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
    before = logits(base)
    by_transformers = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for loaded in (by_transformers, PeftModel.from_pretrained(base, folder)):
        far = (logits(loaded) - expected).abs().mean() / (before - expected).abs().mean()
        assert far < 0.2, far  # merging rounds each weight to bf16
