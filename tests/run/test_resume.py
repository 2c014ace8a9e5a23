"""What a resumed run may change: each setting's field says it."""

import dataclasses
import json

import pytest

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.config.validation import CONDITIONS, on_resume
from fastgrpo.run.resume import CHOSEN, check_settings

FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}


def checkpoint(folder, changes=(), without=()):
    """A checkpoint of a run with the default settings, some of them changed and some not yet known."""
    settings = {**dataclasses.asdict(GRPOConfig()), **dict(changes)}
    settings = {name: value for name, value in settings.items() if name not in without}
    (folder / "trainer_state.json").write_text(json.dumps({"command": "train", "config": settings}))
    return folder


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - {*CHOSEN, "reward_model_kwargs"}))
def test_a_changed_setting_is_refused_or_warned_of_or_free(tmp_path, name):
    folder, said = checkpoint(tmp_path, {name: "before"}), []
    rule, (_, holds) = on_resume(name), CONDITIONS.get(name, (None, None))
    if holds is not None and not holds(GRPOConfig()):
        rule = "free"  # see the next test
    if rule == "same":
        with pytest.raises(
            ValueError, match=rf"trained with {name}='before', now it is .*; leave {name} as it was, or "
        ):
            check_settings(folder, GRPOConfig(), said.append)
    else:
        check_settings(folder, GRPOConfig(), said.append)
    assert [line.startswith(f"warning: {name} was 'before' and is ") for line in said] == [True] * (rule == "inexact")


@pytest.mark.parametrize(
    "name, before, effect",
    [
        ("ref_model_sync_steps", 7, {"beta": 0.1, "sync_ref_model": True}),
        ("sapo_temperature_pos", 2.0, {"loss_type": "sapo"}),
    ],
)
def test_a_change_without_effect_is_free(tmp_path, name, before, effect):
    check_settings(checkpoint(tmp_path, {name: before}), GRPOConfig(), pytest.fail)
    with pytest.raises(ValueError, match=f"was trained with {name}={before!r}"):
        check_settings(checkpoint(tmp_path, {name: before, **effect}), GRPOConfig(**effect), pytest.fail)
    with pytest.raises(ValueError, match="was trained with"):  # it had an effect before, and has none now
        check_settings(checkpoint(tmp_path, {name: before, **effect}), GRPOConfig(), pytest.fail)


@pytest.mark.parametrize("name, before", [("gradient_checkpointing", True), ("dtype", "float32")])
def test_what_auto_chooses_is_compared_when_it_is_known(tmp_path, name, before):
    """A setting that was stated before and is auto now, or the other way, is no change by itself."""
    check_settings(checkpoint(tmp_path, {name: before}), GRPOConfig(), pytest.fail)
    check_settings(checkpoint(tmp_path), GRPOConfig(**{name: before}), pytest.fail)
    said = []
    other = {"gradient_checkpointing": False, "dtype": "bfloat16"}[name]
    check_settings(checkpoint(tmp_path, {name: before}), GRPOConfig(**{name: other}), said.append)
    assert len(said) == 1 and f"{name} was {before!r} and is {other!r} now" in said[0]


def test_what_is_computed_must_stay_and_what_is_recorded_may_change():
    rules = {name: on_resume(name) for name in FIELDS}
    for name in ("learning_rate", "beta", "seed", "loss_type", "importance_sampling_mode", "num_generations", "task"):
        assert rules[name] == "same", name
    for name in ("max_steps", "device", "max_tokens_per_microbatch", "rollout_memory_utilization"):
        assert rules[name] == "inexact", name
    for name in ("output_dir", "save_steps", "report_to", "eval_steps", "resume_from_checkpoint"):
        assert rules[name] == "free", name


@pytest.mark.parametrize(
    "name, before, now, rule",
    [
        ("ref_storage", None, "cpu", "inexact"),
        ("ref_storage", None, "int8", "same"),
        ("ref_storage", "nf4", "cpu", "same"),
        ("reward_model_kwargs", None, '{"device": "cpu"}', "inexact"),
        ("reward_model_kwargs", '{"separator": ";"}', '{"device": "cpu", "separator": ";"}', "inexact"),
        ("reward_model_kwargs", '{"separator": ";"}', None, "same"),
        ("rollout_backend", "fast", "eager", "inexact"),
        ("rollout_backend", "fast", "hf", "same"),
        ("parallel", "ddp", "fsdp2", "free"),
        ("parallel", "fsdp2", "fsdp2_offload", "inexact"),
    ],
)
def test_some_changes_of_a_setting_are_allowed_and_others_not(tmp_path, name, before, now, rule):
    folder, said = checkpoint(tmp_path, {"beta": 0.1, name: before}), []
    if rule == "same":
        with pytest.raises(ValueError, match=f"trained with {name}=.*, which changes what is learned; leave {name}"):
            check_settings(folder, GRPOConfig(beta=0.1, **{name: now}), said.append)
    else:
        check_settings(folder, GRPOConfig(beta=0.1, **{name: now}), said.append)
    assert [line.startswith(f"warning: {name} was ") for line in said] == [True] * (rule == "inexact")


def test_the_same_settings_go_on_in_silence(tmp_path):
    check_settings(checkpoint(tmp_path), GRPOConfig(), pytest.fail)


def test_a_setting_newer_than_the_checkpoint_had_its_default(tmp_path):
    folder = checkpoint(tmp_path, without=("importance_sampling_mode", "max_num_seqs"))
    check_settings(folder, GRPOConfig(), pytest.fail)
    with pytest.raises(ValueError, match="trained with importance_sampling_mode=None, now it is 'token_mask'"):
        check_settings(folder, GRPOConfig(importance_sampling_mode="token_mask"), pytest.fail)


def test_adapters_have_no_weights_to_start_anew_from(tmp_path):
    with pytest.raises(ValueError, match=r"leave beta as it was$"):
        check_settings(checkpoint(tmp_path, {"use_peft": True, "beta": 0.1}), GRPOConfig(use_peft=True), pytest.fail)
