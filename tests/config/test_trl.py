"""`GRPOConfig` takes TRL's arguments: each is listed once, and translated, idle or refused."""

import dataclasses
import inspect
import json

import pytest
import torch
from transformers import IntervalStrategy, SchedulerType

from fastgrpo.config import recipe, trl
from fastgrpo.config.settings import GRPOConfig, SFTConfig
from fastgrpo.config.trl import ACCEPTED, BATCH, IDLE_WHY, INSTEAD, OTHER_DEFAULTS, SAME, THEIRS

OURS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
UPDATES = {"steps_per_generation": 2, "num_iterations": 2}
SYNCED = {"beta": 0.1, "sync_ref_model": True}
FOUR = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}


@pytest.fixture(scope="module")
def defaults():
    theirs = pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed (extra: integrations)")
    fields = dataclasses.fields(theirs.GRPOConfig)
    return {f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for f in fields}


def changed(**arguments):
    return {name: value for name, value in dataclasses.asdict(GRPOConfig(**arguments)).items() if value != OURS[name]}


def test_every_field_of_trl_is_listed_once(defaults):
    older = {"logging_dir", "max_prompt_length", "save_safetensors", "warmup_ratio"}
    assert {*SAME, *THEIRS} - older == {*defaults}
    rows = (*trl.TRANSLATED, *trl.IDLE, *trl.REFUSED)
    listed = [*SAME, *(name for row in rows for name in row[0].split())]
    assert len(listed) == len({*listed})
    assert SAME.keys() <= OURS.keys() and not THEIRS & OURS.keys() and ACCEPTED.keys() <= INSTEAD.keys()


def test_each_default_is_trls(defaults):
    for name in BATCH:
        assert BATCH[name] == defaults[name], name
    for name in defaults.keys() & INSTEAD.keys():
        assert not defaults[name] or defaults[name] == ACCEPTED[name][0], name
    for name in SAME:
        assert OTHER_DEFAULTS.get(name, OURS[name]) == defaults[name], name
    for name, default in OTHER_DEFAULTS.items():
        assert name in SAME and default != OURS[name], name


def test_trls_defaults_are_never_refused(defaults):
    for name, default in defaults.items():
        GRPOConfig(**{name: default})
    assert changed(**defaults) == {  # TRL's batch of 8 completions is one group, and these defaults are others here
        "prompts_per_step": 1, "gradient_checkpointing": True, "use_liger_kernel": False, "eval_on_start": False,
    }  # fmt: skip


@pytest.mark.parametrize("name", INSTEAD)
def test_refused_arguments_name_an_alternative(name):
    with pytest.raises(ValueError, match=f"^{name}='anything' .{{20,}}"):
        GRPOConfig(**{name: "anything"})
    for value in (None, False, *ACCEPTED.get(name, ())):
        assert changed(**{name: value}) == {}


def test_idle_arguments_and_values_that_mean_the_default_change_nothing():
    assert all(changed(**{name: "anything"}) == {} for name in IDLE_WHY)
    for arguments in (
        {"fsdp": ""}, {"fsdp": []}, {"fsdp_config": {}}, {"eval_delay": 0.0},
        {"debug": []}, {"hub_strategy": "end"}, {"reward_weights": None}, {"disable_tqdm": None}, {"report_to": []},
    ):  # fmt: skip
        assert changed(**arguments) == {}


# By hand from TRL's formulas: arguments -> prompts_per_step, updates_per_rollout, and the processes of the run.
BATCHES = {
    "a group": ({"per_device_train_batch_size": 8}, 1, 1, 1),
    "accumulated": ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, 2, 1, 1),
    "two updates": ({"per_device_train_batch_size": 8, "steps_per_generation": 2}, 2, 2, 1),
    "of accumulated ones":
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8}, 4, 4, 1),
    "by the whole": ({"per_device_train_batch_size": 8, "generation_batch_size": 32}, 4, 4, 1),
    "several processes": ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, 2, 1, 4),
    "the whole of several":
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "generation_batch_size": 32}, 4, 2, 2),
    "another group": ({"gradient_accumulation_steps": 3, "num_generations": 6}, 4, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
def test_translates_batch_arguments(case, monkeypatch):
    arguments, prompts, updates, processes = BATCHES[case]
    trl = pytest.importorskip("trl", reason="TRL is not installed (extra: integrations)")
    monkeypatch.setattr(trl.GRPOConfig, "world_size", processes)
    theirs = trl.GRPOConfig(use_cpu=True, bf16=False, **arguments)
    monkeypatch.setenv("WORLD_SIZE", str(processes))  # accelerate would wait for the others
    config = GRPOConfig(**arguments)
    assert (config.prompts_per_step, config.updates_per_rollout) == (prompts, updates)
    assert theirs.generation_batch_size == config.prompts_per_step * config.num_generations
    assert theirs.steps_per_generation == config.updates_per_rollout * theirs.gradient_accumulation_steps


def test_all_rollouts_of_an_update_become_one():
    config = GRPOConfig(per_device_train_batch_size=8, steps_per_generation=2, gradient_accumulation_steps=4)
    assert (config.prompts_per_step, config.updates_per_rollout) == (4, 1)


@pytest.mark.parametrize("named, arguments", [
    ("per_device_train_batch_size=3", {"per_device_train_batch_size": 3}),
    ("steps_per_generation=3", {"steps_per_generation": 3, "gradient_accumulation_steps": 2}),
    ("steps_per_generation=2 and generation_b", {"steps_per_generation": 2, "generation_batch_size": 16}),
    ("updates_per_rollout=4", {"per_device_train_batch_size": 2, "steps_per_generation": 4}),
    ("max_steps=5", {"steps_per_generation": 2, "max_steps": 5}),
    ("ref_model_sync_steps=3",
     {"gradient_accumulation_steps": 1, "num_iterations": 2, "ref_model_sync_steps": 3} | SYNCED),
    ("eval_strategy='epoch'", {"eval_strategy": "epoch"}), ("fp16=True", {"fp16": True}),
    ("model_init_kwargs has device_map", {"model_init_kwargs": {"device_map": "auto"}}),
    ("per_device_train_batch_size=32", {"per_device_train_batch_size": 32, "prompts_per_step": 3}),
    ("bf16=True", {"bf16": True, "dtype": "float32"}),
    ("metric_for_best_model=eval_reward",
     FOUR | {"eval_steps": 10, "save_steps": 5, "metric_for_best_model": "eval_reward"}),
])  # fmt: skip
def test_contradictory_or_fractional_arguments_are_refused(named, arguments):
    with pytest.raises(ValueError, match=f"^{named}"):
        GRPOConfig(**arguments)


SERVED = {"use_vllm": True, "vllm_mode": "server"}


@pytest.mark.parametrize("arguments, made", [
    # counts of updates become counts of steps, those that TRL's defaults give too
    (UPDATES | SYNCED | {"max_steps": 12, "logging_steps": 5, "eval_steps": 8, "save_steps": 1,
                         "ref_model_sync_steps": 8},
     {"max_steps": 3, "logging_steps": 2, "eval_steps": 2, "save_steps": 1, "ref_model_sync_steps": 2}),
    (UPDATES | SYNCED, {"logging_steps": 3, "save_steps": 125, "ref_model_sync_steps": 128}),
    ({"per_device_train_batch_size": 8, "num_iterations": 2, "save_strategy": "no"}, {"save_steps": None}),
    # without names of batches, steps are steps
    ({"updates_per_rollout": 2, "max_steps": 5, "use_cpu": True}, {"max_steps": 5, "save_steps": 500}),
    # a checkpoint still meets its evaluation after both are rounded
    (FOUR | {"eval_steps": 5, "save_steps": 10, "metric_for_best_model": "eval_reward"},
     {"eval_steps": 2, "save_steps": 4}),
    # evaluations
    ({"eval_strategy": "steps", "eval_steps": 7}, {"eval_steps": 7, "eval_strategy": "steps", "eval_on_start": False}),
    ({"eval_strategy": "steps", "logging_steps": 4}, {"eval_steps": 4, "eval_on_start": False}),
    ({"eval_strategy": "no", "eval_steps": 7}, {"eval_steps": None, "eval_strategy": "no", "eval_on_start": False}),
    ({"eval_strategy": "steps", "eval_steps": 6, "steps_per_generation": 2}, {"eval_steps": 3}),
    ({"num_generations_eval": 2}, {"eval_num_generations": 2}),
    # precision
    ({"bf16": True}, {"dtype": "bfloat16"}), ({"bf16": False}, {"dtype": "float32"}),
    ({"bf16": False, "model_init_kwargs": {"dtype": "bfloat16"}}, {"dtype": "bfloat16"}),
    ({"bf16": True, "model_init_kwargs": {"dtype": "float32"}}, {"dtype": "bfloat16"}),
    ({"model_init_kwargs": {"torch_dtype": torch.bfloat16, "trust_remote_code": True, "use_cache": False}},
     {"dtype": "bfloat16", "trust_remote_code": True}),
    # vLLM servers
    ({"use_vllm": True}, {"rollout_backend": "auto", "importance_sampling_mode": None}),
    ({"use_vllm": True, "vllm_server_base_url": "http://h:9"}, {"rollout_backend": "auto"}),
    (SERVED | {"vllm_importance_sampling_cap": 2.0}, {"importance_sampling_clip_max": 2.0}),
    (SERVED, {"rollout_backend": "vllm", "vllm_server_base_url": ("http://127.0.0.1:8000",),
              "importance_sampling_mode": "sequence_mask", "importance_sampling_clip_max": 3.0}),
    (SERVED | {"vllm_server_host": "h", "vllm_server_port": 9, "vllm_importance_sampling_correction": False},
     {"vllm_server_base_url": ("http://h:9",), "importance_sampling_mode": None}),
    (SERVED | {"vllm_server_base_url": "http://h:9", "vllm_importance_sampling_mode": "token_truncate",
               "vllm_importance_sampling_clip_max": 2.0, "vllm_importance_sampling_clip_min": 0.5},
     {"vllm_server_base_url": ("http://h:9",), "importance_sampling_mode": "token_truncate",
      "importance_sampling_clip_max": 2.0, "importance_sampling_clip_min": 0.5}),
    # the rest
    ({"scale_rewards": True}, {"scale_rewards": "group"}), ({"scale_rewards": False}, {"scale_rewards": "none"}),
    ({"report_to": None}, {"report_to": ("none",)}), ({"use_cpu": True}, {"device": "cpu"}),
    ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
    ({"lr_scheduler_type": SchedulerType.COSINE, "eval_strategy": IntervalStrategy.NO},
     {"lr_scheduler_type": "cosine", "eval_on_start": False}),
])  # fmt: skip
def test_translates_arguments(arguments, made):
    config = GRPOConfig(**arguments)
    assert {name: getattr(config, name) for name in made} == made


GIVEN = {
    "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 64,
    "do_sample": True, "num_beams": 1, "use_cache": False, "pad_token_id": 3, "typical_p": None,
}  # fmt: skip


@pytest.mark.parametrize("form", [dict, json.dumps], ids=["dict", "JSON"])
def test_generation_kwargs_become_settings(form):
    assert changed(generation_kwargs=form(GIVEN)) == {
        "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
        "max_completion_length": 64,
    }  # fmt: skip
    for nothing in (None, {}, {"top_k": None}):
        assert changed(generation_kwargs=nothing) == {}


@pytest.mark.parametrize("given, named", [
    ({"top_k": 3, "do_sample": False}, "has do_sample=.*temperature"), ({"num_beams": 4}, "has num_beams="),
    ({"suppress_tokens": [3]}, "has suppress_tokens="), ("top_k=3", "must be a dict"), ("[1]", "must be a dict"),
])  # fmt: skip
def test_rejects_other_generation_options(given, named):
    with pytest.raises(ValueError, match=f"^generation_kwargs {named}"):
        GRPOConfig(generation_kwargs=given)


def test_the_record_holds_settings_only():
    config = GRPOConfig(per_device_train_batch_size=16, max_steps=4, use_cpu=True)
    assert dataclasses.replace(config, beta=0.1, device="auto").prompts_per_step == 2
    assert "per_device_train_batch_size" not in dataclasses.asdict(config)
    assert [*inspect.signature(GRPOConfig).parameters] == [*OURS] and next(iter(OURS)) == "model_name_or_path"


def test_files_commands_and_other_records_take_settings_only(tmp_path):
    with pytest.raises(ValueError, match="per_device_train_batch_size"):
        recipe.parse(["--per_device_train_batch_size", "8"])
    (tmp_path / "a.yaml").write_text("use_cpu: true\n")
    with pytest.raises(ValueError, match="unknown setting 'use_cpu'"):
        recipe.parse(["--config", str(tmp_path / "a.yaml")])
    with pytest.raises(TypeError, match="SFTConfig: unknown setting 'use_cpu'"):
        SFTConfig(use_cpu=True)
    with pytest.raises(TypeError, match=r"unknown setting 'use_vlm'; did you mean 'use_vllm'\?"):
        GRPOConfig(use_vlm=False)
