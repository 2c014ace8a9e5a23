"""Checkpoints in other programs: what `vllm serve`, peft and transformers ask of a folder, stated as tests.

vLLM reads config.json, the tokenizer with its chat template, generation_config.json and *.safetensors. Of adapters it
reads adapter_config.json and adapter_model.safetensors, under peft's names.
"""

import json

import pytest
import runs
import tiny
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fastgrpo.run.checkpoint import verify

IDS = torch.tensor([[5, 9, 60, 33, 7]])


def varied(completions, **_):
    """A reward in which the completions of every group differ."""
    return [sum(map(ord, text)) % 7 for text in completions]


def trained(folder, **settings):
    trainer = runs.make_trainer(folder, varied, chat=True, dtype="bfloat16", learning_rate=1e-2, **settings)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastgrpo.run.curves.draw_curves", lambda *_: None)
        return trained(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastgrpo.run.curves.draw_curves", lambda *_: None)
        return trained(tmp_path_factory.mktemp("lora"), use_peft=True, lora_target_modules="all-linear")


@pytest.fixture
def whole(request, plain, lora):
    """A folder that `vllm serve` takes: a checkpoint, or the merged model of a run with adapters."""
    return {"checkpoint": plain.log.dir / "checkpoint-2", "merged": lora.log.dir / "merged"}[request.param]


def read(path):
    return json.loads(path.read_text())


every_whole = pytest.mark.parametrize("whole", ["checkpoint", "merged"], indirect=True)


@every_whole
def test_the_config_names_the_architecture_and_the_precision(whole):
    config = read(whole / "config.json")
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["model_type"] == "qwen2"
    assert config["dtype"] == "bfloat16"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert not {"auto_map", "quantization_config", "attn_implementation", "_attn_implementation"} & set(config)


@every_whole
def test_the_weights_are_one_set_under_the_names_of_the_architecture(whole):
    files = [path.name for path in whole.iterdir() if path.suffix in (".safetensors", ".bin")]
    assert files == ["model.safetensors"]
    with safe_open(whole / "model.safetensors", "pt") as weights:
        held = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        assert weights.metadata() == {"format": "pt"}
        assert {part.get_dtype() for part in held.values()} == {"BF16"}
        expected = tiny.model(vocab_size=258).state_dict()
        assert {name: tuple(part.get_shape()) for name, part in held.items()} == {
            name: tuple(value.shape) for name, value in expected.items()
        }


@every_whole
def test_the_tokenizer_comes_with_its_chat_template_and_end(whole):
    tokenizer = AutoTokenizer.from_pretrained(whole, local_files_only=True)
    assert (whole / "chat_template.jinja").read_text() == tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<user>a\n"
    assert GenerationConfig.from_pretrained(whole).eos_token_id == tokenizer.eos_token_id == 1


def logits(model):
    with torch.no_grad():
        return model.float().eval()(IDS).logits


def test_transformers_loads_the_checkpoint_as_it_is(plain):
    model = AutoModelForCausalLM.from_pretrained(plain.log.dir / "checkpoint-2", dtype="auto")
    assert model.dtype == torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(plain.log.dir.parent / "model", dtype=torch.bfloat16).state_dict()
    trained, moved = plain.model.state_dict(), 0
    for name, value in model.state_dict().items():
        assert value.equal(trained[name].cpu())
        moved += not value.equal(base[name])
    assert moved


def test_peft_loads_the_adapters_as_they_are(lora):
    """On the base that they name. vLLM reads the same files under `--lora-modules NAME=FOLDER`."""
    from peft import PeftModel

    folder = lora.log.dir / "checkpoint-2"
    config = read(folder / "adapter_config.json")
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM" and config["r"] == 16
    assert config["base_model_name_or_path"] == str(lora.log.dir.parent / "model")
    assert isinstance(config["target_modules"], list)
    # What vLLM refuses in adapters.
    assert config["bias"] == "none" and not config["use_dora"] and config["modules_to_save"] is None
    with safe_open(folder / "adapter_model.safetensors", "pt") as weights:
        names = list(weights.keys())
    assert names and all(name.startswith("base_model.model.model.layers.") for name in names)
    assert {name.split(".")[-2] for name in names} == {"lora_A", "lora_B"}
    assert {name.split(".")[-3] for name in names} == {name.split(".")[-1] for name in config["target_modules"]}

    expected = logits(AutoModelForCausalLM.from_pretrained(lora.log.dir / "merged", dtype="auto"))
    base = AutoModelForCausalLM.from_pretrained(lora.log.dir.parent / "model", dtype=torch.bfloat16)
    before = logits(base)
    by_transformers = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for loaded in (by_transformers, PeftModel.from_pretrained(base, folder)):
        far = (logits(loaded) - expected).abs().mean() / (before - expected).abs().mean()
        assert far < 0.2, far  # merging rounds each weight to bf16


def test_every_folder_has_its_card(plain, lora):
    """Under the manifest where there is one: a checkpoint whose card was changed is not the one that the run wrote."""
    folders = {plain.log.dir / "checkpoint-2": "transformers", lora.log.dir / "checkpoint-2": "peft",
               lora.log.dir / "merged": "transformers"}  # fmt: skip
    for folder, library in folders.items():
        card = ModelCard.load(folder / "README.md")
        assert card.data.library_name == library and "grpo" in card.data.tags
        assert "| steps" in card.text and str(plain.log.dir.parent) not in card.content
        if (folder / "manifest.json").exists():
            assert "README.md" in read(folder / "manifest.json")["files"]
            verify(folder, of_run=True)
    card = plain.log.dir / "checkpoint-2" / "README.md"
    before = card.read_text()
    card.write_text(before + "mine\n")
    with pytest.raises(ValueError, match=r"README\.md is damaged"):
        verify(plain.log.dir / "checkpoint-2")
    card.write_text(before)
