"""Settings that a resumed run may change, and the files that a run reads."""

import dataclasses
import json

import pytest

from fastgrpo.config.settings import GRPOConfig, TrainConfig
from fastgrpo.config.validation import CONDITIONS, on_resume
from fastgrpo.run.resume import CHOSEN, check_settings, inputs_of, newest_good

FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}


def changed(folder, rule, before, now=None, without=()):
    """Check the settings `now` against a checkpoint of those `before`: they follow this rule."""
    settings = {**dataclasses.asdict(GRPOConfig()), **before}
    settings = {name: value for name, value in settings.items() if name not in without}
    (folder / "trainer_state.json").write_text(json.dumps({"command": "train", "config": settings}))
    said = []
    if rule == "same":
        with pytest.raises(ValueError, match="was trained with ") as error:
            check_settings(folder, GRPOConfig(**(now or {})), said.append)
        said.append(str(error.value))
    else:
        check_settings(folder, GRPOConfig(**(now or {})), said.append)
        assert [line.startswith("warning: ") for line in said] == [True] * (rule == "inexact")
    return "".join(said)


def test_a_changed_setting_is_refused_or_warned_of_or_free(tmp_path):
    for name in FIELDS.keys() - {*CHOSEN, "reward_model_kwargs"}:
        rule, (_, holds) = on_resume(name), CONDITIONS.get(name, (None, None))
        if holds is not None and not holds(GRPOConfig()):
            rule = "free"  # it had no effect and has none now
        assert (name in changed(tmp_path, rule, {name: "before"})) == (rule != "free"), name


SYNCED = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 7}


@pytest.mark.parametrize("before, now, rule", [
    ({}, {}, "free"),
    # a change without effect is free, unless it had an effect before
    ({"ref_model_sync_steps": 7}, {}, "free"),
    (SYNCED, {"beta": 0.1}, "same"),
    # what auto chooses is compared when it is known
    ({"gradient_checkpointing": True}, {}, "free"),
    ({"gradient_checkpointing": True}, {"gradient_checkpointing": False}, "inexact"),
    # some values of a setting are more alike than others
    ({"ref_storage": None}, {"ref_storage": "cpu"}, "inexact"),
    ({"ref_storage": "nf4"}, {"ref_storage": "cpu"}, "same"),
    ({}, {"reward_model_kwargs": '{"device": "cpu"}'}, "inexact"),
    ({"reward_model_kwargs": '{"separator": ";"}'}, {}, "same"),
    ({"rollout_backend": "fast"}, {"rollout_backend": "eager"}, "inexact"),
    ({"rollout_backend": "auto"}, {"rollout_backend": "hf"}, "same"),
    ({"parallel": "fsdp2"}, {"parallel": "fsdp2_offload"}, "inexact"),
    ({"model_name_or_path": "models/small"}, {"model_name_or_path": "/big/models/small"}, "free"),
    ({"model_name_or_path": "models/small"}, {"model_name_or_path": "models/large"}, "same"),
])  # fmt: skip
def test_some_changes_depend_on_the_values(tmp_path, before, now, rule):
    if "ref_storage" in before:
        before, now = before | {"beta": 0.1}, now | {"beta": 0.1}
    changed(tmp_path, rule, before, now)


def test_a_setting_newer_than_the_checkpoint_had_its_default(tmp_path):
    new = ("importance_sampling_mode", "max_num_seqs")
    changed(tmp_path, "free", {}, without=new)
    changed(tmp_path, "same", {}, {"importance_sampling_mode": "token_mask"}, without=new)


def test_finds_the_files_of_a_run(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    config = TrainConfig(task="dataset", dataset_name=str(tmp_path / "rows.jsonl"), model_name_or_path="m")
    assert list(inputs_of(config, str(tmp_path)).values()) == [tmp_path, tmp_path / "rows.jsonl"]
    of_the_hub = TrainConfig(task="gsm8k", model_name_or_path="m", dataset_name="openai/gsm8k")
    assert inputs_of(of_the_hub, "Qwen/Qwen3-0.6B") == {}


def test_a_run_without_an_intact_checkpoint_is_refused(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match="is intact"):
        newest_good(tmp_path, lambda line: None)
