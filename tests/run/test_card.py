"""The model card: its head is what the hub reads, and its text says what was trained on what, and with what result."""

from pathlib import Path

from huggingface_hub import ModelCard

from fastgrpo import SFTConfig
from fastgrpo.config.settings import TrainConfig
from fastgrpo.data.records import TrainerState
from fastgrpo.run.card import model_card, on_hub

STATE = TrainerState(50, 200, 0.25, 64, 123456, 50, 0.31, 0.445)
SETTINGS = {"task": "gsm8k", "beta": 0.04, "learning_rate": 3e-6, "output_dir": "runs/mine", "logging_steps": 1}


def card(config=TrainConfig, state=STATE, adapters=False, base="Qwen/Qwen2.5-0.5B", inputs=None, **settings):
    args = config(**{**SETTINGS, **settings} if config is TrainConfig else settings)
    known = {"name": "sums-1", "base": base, "rows": 7473, "rewards": ("correctness", "format_reward")}
    return model_card(args, state, adapters=adapters, inputs=inputs or {}, **known)


def test_metadata_is_what_the_hub_reads():
    head = ModelCard(card()).data.to_dict()
    assert head == {
        "base_model": "Qwen/Qwen2.5-0.5B", "datasets": ["openai/gsm8k"], "library_name": "transformers",
        "model_name": "sums-1", "pipeline_tag": "text-generation",
        "tags": ["generated_from_trainer", "fastgrpo", "grpo"],
    }  # fmt: skip
    supervised = card(SFTConfig, task="sums", max_steps=5)
    assert ModelCard(supervised).data.tags[-1] == "sft" and "2402.03300" not in supervised


def test_text_describes_data_settings_and_results():
    text = ModelCard(card(system_prompt="Think | first.\n" * 9)).text
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in text.splitlines() if line[:1] == "|"}
    assert rows["steps"] == "50 of 200" and rows["prompt and completion tokens"] == "123,456"
    assert rows["held-out accuracy before training"] == "0.310"
    assert rows["held-out accuracy after step 50"] == "0.445"
    assert (rows["`beta`"], rows["`learning_rate`"]) == ("`0.04`", "`3e-06`")
    assert "Think | first.\n" * 9 in text
    # what a run records and where is no setting of the model, and what has its default is left out
    assert not {"`output_dir`", "`logging_steps`", "`epsilon`", "`model_name_or_path`"} & set(rows)


def test_adapters_name_their_rank_and_library():
    written = card(adapters=True, use_peft=True, lora_r=12, state=TrainerState(2, 2, 0.5, 64))
    head = ModelCard(written).data.to_dict()
    assert head["library_name"] == "peft" and head["tags"][-1] == "lora"
    assert "--max-lora-rank 16 --lora-modules\nNAME=FOLDER" in written and "vllm serve FOLDER" not in written
    assert "accuracy" not in written.replace("`accuracy", "")  # nothing was evaluated


def test_contains_no_local_paths(tmp_path):
    """A folder is named by its last part only, and is neither base_model nor a data set of the hub."""
    base, rows = tmp_path / "secret" / "base", tmp_path / "secret" / "rows.jsonl"
    base.mkdir(parents=True)
    rows.touch()
    settings = {"task": "dataset", "dataset_name": str(rows), "model_name_or_path": str(base)}
    written = card(base=str(base), **settings)
    assert "`base`, a folder or file, was trained" in written and "`rows.jsonl`" in written and "secret" not in written
    assert not {"base_model", "datasets"} & set(ModelCard(written).data.to_dict())
    assert "A model that was made in Python was trained" in card(base="")


def test_distinguishes_hub_names_from_paths():
    assert on_hub("Qwen/Qwen2.5-0.5B", {}) and on_hub("gpt2", {})
    for name in ("a/b/c", "model.gguf", "o/rows.jsonl", "/data/model", "./model", ""):
        assert not on_hub(name, {})
    read = {"the model": Path("runs/mine"), "the data set": Path("my/rows")}
    assert not on_hub("runs/mine", read) and on_hub("runs/other", read)
    written = card(base="runs/mine", inputs=read, task="dataset", dataset_name="my/rows")
    assert not {"base_model", "datasets"} & set(ModelCard(written).data.to_dict())
