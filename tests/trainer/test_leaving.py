"""Output on request: models, metrics, state, and an upload."""

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from runs import make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastgrpo.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("without_curves")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("leaving"))
    trainer.result = trainer.train()
    return trainer


def test_only_rank_0_saves_a_replicated_model(trainer, tmp_path, monkeypatch):
    """Scripts save under `if trainer.is_world_process_zero()`, so that no other rank comes to meet it."""
    for wait in ("meet", "any", "gather", "from_lead"):
        monkeypatch.setattr(type(trainer.ranks), wait, lambda *_: pytest.fail("rank 0 waits for the others"))
    trainer.save_model(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").vocab_size == trainer.tokenizer.vocab_size
    assert all(torch.equal(loaded.get_parameter(name), value) for name, value in trainer.model.named_parameters())


def test_refuses_to_write_after_the_run_if_another_run_has_the_folder(trainer):
    other = RunFolder(trainer.log.folder.path)
    for write in (trainer.save_model, lambda: trainer.save_metrics("late", {})):
        with pytest.raises(ValueError, match="is in use"):
            write()
    assert not (trainer.log.folder.path / "late_results.json").exists()
    other.close()


def test_in_the_folder_of_the_run_the_model_has_a_folder_of_its_own(trainer):
    for folder in (trainer.log.dir, trainer.log.dir / "final"):
        trainer.save_model(str(folder))
        assert (trainer.log.dir / "final" / "model.safetensors").exists() and not trainer.log.folder.foreign()
    assert json.loads((trainer.log.dir / "config.json").read_text())["command"] == "train"


def test_metrics_and_state_are_written(trainer, capsys):
    trainer.log_metrics("train", trainer.result.metrics)
    assert "***** train metrics *****" in capsys.readouterr().out
    trainer.save_metrics("train", trainer.result.metrics)
    trainer.save_metrics("eval", {"eval_reward": 1.0})
    trainer.save_state()
    names = ("train", "eval", "all")
    train, evaluation, both = (json.loads((trainer.log.dir / f"{x}_results.json").read_text()) for x in names)
    assert both == train | evaluation and train["train_loss"] == trainer.result.training_loss
    state = json.loads((trainer.log.dir / "trainer_state.json").read_text())
    assert state["global_step"] == 2 and state["log_history"][-1]["train_loss"] == trainer.result.training_loss
    assert trainer.is_world_process_zero() and trainer.is_local_process_zero()


@pytest.fixture
def hub(monkeypatch):
    """What a stand-in for HfApi is asked for."""
    asked = []

    class Hub:
        def __init__(self, token=None):
            self.create_branch = lambda repo, branch, exist_ok: asked.append((token, branch))

        def create_repo(self, name, **settings):
            asked.append((name, settings))
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, folder_path, **settings):
            asked.append((sorted(path.name for path in Path(folder_path).iterdir()), settings))
            return "the commit"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr("fastgrpo.trainer.setup.get_token", lambda: asked)
    return asked


def test_the_model_is_uploaded_at_the_end_and_on_request(tmp_path, hub):
    with pytest.raises(ValueError, match="needs a login"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastgrpo.trainer.setup.get_token", lambda: None)
        make_trainer(tmp_path, push_to_hub=True)
    with pytest.raises(ValueError, match=r"hub_model_id: .*org/a b"):
        make_trainer(tmp_path, hub_model_id="org/a b")
    trainer = make_trainer(tmp_path, push_to_hub=True, hub_model_id="org/mine", hub_private_repo=True)
    trainer.train()
    (repo, settings), (files, upload) = hub
    assert repo == "org/mine" and settings == {"private": True, "exist_ok": True}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert upload["repo_id"] == f"me/{repo}"
    assert trainer.push_to_hub(commit_message="done", dataset_name="mine") == "the commit"
    expected = {"repo_id": f"me/{repo}", "commit_message": "done", "revision": None}
    assert expected.items() <= hub[-1][1].items() and "config.json" in hub[-1][1]["delete_patterns"]
    trainer.push_to_hub(token="mine", revision="dev")
    assert hub[-2] == ("mine", "dev") and hub[-1][1]["revision"] == "dev"


def test_adapters_are_uploaded_merged_if_their_base_is_not_on_the_hub(tmp_path, hub):
    make_trainer(tmp_path, use_peft=True, push_to_hub=True, output_dir=str(tmp_path / "lr=1e-6..2.git")).train()
    (repo, _), (files, _) = hub
    assert "model.safetensors" in files and "adapter_model.safetensors" not in files and repo == "lr-1e-6.2"
