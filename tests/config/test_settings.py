"""All settings: defaults, the record, and every bound, choice and condition that a field states."""

import copy
import dataclasses
import json
import math
import pickle
import re
from pathlib import Path
from typing import get_args, get_origin

import numpy as np
import pytest
import torch

from fastgrpo.config.fields import RESUME, setting_of
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.config.trl_translations import VALUES
from fastgrpo.loss.objective import Objective

FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}
KNOBS = {field.name for field in dataclasses.fields(Objective)} & set(FIELDS)
# The condition of some settings, as its field says it -> settings with which it holds, and with which it does not.
CONDITIONS = {
    "log_completions is True": ({"log_completions": True}, {}),
    "report_to has wandb or trackio": ({"report_to": ("trackio",)}, {"report_to": ("tensorboard",)}),
    "resume_from_checkpoint is set": ({"resume_from_checkpoint": "runs/x/checkpoint-1"}, {}),
    "use_peft is True": ({"use_peft": True}, {}),
    "task is gsm8k": ({"task": "gsm8k"}, {}),
    "dynamic_sampling is True": ({"dynamic_sampling": True}, {}),
    "lr_scheduler_type is not constant (constant_with_warmup is the one with a warmup)": (
        {},
        {"lr_scheduler_type": "constant"},
    ),
    "max_steps is -1 (a task's recipe may have set it: pass --max_steps -1)": ({}, {"max_steps": 3}),
    "metric_for_best_model is set": ({"metric_for_best_model": "reward"}, {}),
    "importance_sampling_mode is set": ({"importance_sampling_mode": "token_mask"}, {}),
    "loss_type is sapo": ({"loss_type": "sapo"}, {}),
    "loss_type is vespo": ({"loss_type": "vespo"}, {}),
    "beta is above 0": ({"beta": 0.1}, {}),
    "sync_ref_model is True": ({"beta": 0.1, "sync_ref_model": True}, {}),
    "rollout_backend is fast": ({}, {"rollout_backend": "hf"}),
    "parallel is fsdp2": ({"parallel": "fsdp2"}, {"parallel": "ddp"}),
    "use_adaptive_entropy is True": ({"use_adaptive_entropy": True}, {}),
    "mask_truncated_completions is True": ({"mask_truncated_completions": True}, {}),
    "eval_num_generations is above 0": ({"eval_num_generations": 4}, {}),
}


def outside(known):
    """Numbers outside of a setting's interval, and what is no number. At 3e38, 1 more would be no other number."""
    bounds = known.within
    if bounds.at_least is not None:
        yield bounds.at_least - max(1, abs(bounds.at_least))
    if bounds.above is not None:
        yield bounds.above
    if bounds.at_most is not None:
        yield bounds.at_most + max(1, abs(bounds.at_most))
    if bounds.below is not None:
        yield bounds.below
    yield from (math.nan, math.inf)


def another(field):
    """A value that a setting may have and that is not its default."""
    known, kind = setting_of(field), field.type
    if known.choices is not None:
        choice = next(choice for choice in known.choices if choice != field.default)
        return (choice,) if get_origin(kind) is tuple else choice
    kinds = {kind, *get_args(kind)} - {type(None)}
    if bool in kinds:
        return not field.default
    if get_origin(kind) is tuple:
        return ("q_proj",)
    if known.within is not None:
        default = field.default or 0
        return next(v for v in (default + 1, default / 2) if not refused_by_itself(field, v))
    return "another"


def refused_by_itself(field, value):
    try:
        setting_of(field).check(field.name, value)
    except ValueError:
        return True
    return False


def test_unstated_defaults_are_trls():
    config = GRPOConfig()
    assert (config.beta, config.epsilon, config.num_generations, config.loss_type) == (0.0, 0.2, 8, "dapo")
    assert (config.learning_rate, config.temperature, config.scale_rewards) == (1e-6, 1.0, "group")
    assert (config.max_completion_length, config.logging_steps, config.max_grad_norm) == (512, 10, 1.0)
    # The rest is compared with TRL's own fields in test_trl_names.py.


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if setting_of(field).within])
def test_every_bound_is_held(name):
    field = FIELDS[name]
    several = get_origin(field.type) is tuple
    for value in outside(setting_of(field)):
        with pytest.raises(ValueError, match=f"^{name} must be "):
            GRPOConfig(**{name: (1.0, value) if several else value})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if setting_of(field).choices])
def test_every_choice_is_held(name):
    choices = ", ".join(map(str, setting_of(FIELDS[name]).choices))
    with pytest.raises(ValueError, match=f"^{name} must be one of {choices}, got 'another'$"):
        GRPOConfig(**{name: "another"})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if setting_of(field).active])
def test_every_condition_is_held(name):
    text, value = setting_of(FIELDS[name]).active.text, another(FIELDS[name])
    holds, holds_not = CONDITIONS[text]
    assert getattr(GRPOConfig(**{**holds, name: value}), name) == value
    with pytest.raises(ValueError, match=re.escape(f"{name} has an effect only where {text}; leave it out")):
        GRPOConfig(**{**holds_not, name: value})


def test_every_setting_must_be_given_where_none_means_nothing():
    for name, field in FIELDS.items():
        if type(None) not in get_args(field.type) and name not in VALUES:  # where None has TRL's meaning
            with pytest.raises(ValueError, match=f"^{name} must be given, got None"):
                GRPOConfig(**{name: None})


def test_every_help_is_sentences_of_its_own():
    helps = [setting_of(field).help for field in FIELDS.values()]
    assert len(set(helps)) == len(helps)
    for name, text in zip(FIELDS, helps, strict=True):
        assert re.fullmatch(r"[A-Z].{20,}\.", text), f"{name}: {text}"
        assert not re.match(r"(Of|And|At|Also|To|As) ", text), f"{name}: {text}"
        assert setting_of(FIELDS[name]).resume in RESUME


def test_the_loss_and_its_settings_allow_the_same():
    """The loss checks its knobs again, as a library of its own."""
    assert len(KNOBS) == len(dataclasses.fields(Objective))
    own = {field.name: field.default for field in dataclasses.fields(Objective)}
    others = {"max_completion_length", "importance_sampling_mode", "use_bias_correction_kl"}  # see docs/objectives.md
    for name in KNOBS - others:
        assert own[name] == FIELDS[name].default, name
        known = setting_of(FIELDS[name])
        for value in outside(known) if known.within else ():
            if value != math.inf:  # an infinite bound is no bound
                with pytest.raises(ValueError):
                    Objective(**{name: value})
        for choice in known.choices or ():
            if choice not in ("luspo", "cispo", "dr_grpo"):  # these need a second knob
                assert getattr(Objective(**{name: choice}), name) == choice


def test_the_objective_gets_every_knob_of_its_own():
    config = GRPOConfig(
        loss_type="dr_grpo", epsilon_high=0.28, delta=4.0, beta=0.1, kl="k2", max_completion_length=77,
        importance_sampling_level="sequence", importance_sampling_mode="token_mask", importance_sampling_clip_max=2.0,
    )  # fmt: skip
    for name in KNOBS:
        assert getattr(config.objective, name) == getattr(config, name), name


def test_without_a_mode_the_objective_keeps_its_own():
    assert GRPOConfig().objective.importance_sampling_mode == Objective().importance_sampling_mode


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(TypeError, match="GRPOConfig: unknown setting 'learning_rat'; did you mean 'learning_rate'"):
        GRPOConfig(learning_rat=1e-6)
    config = GRPOConfig(beta=0.1)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == dataclasses.replace(config) == config


def test_frozen_and_lists_are_welcome():
    config = GRPOConfig(reward_weights=[1, 2], report_to="tensorboard")
    assert config.reward_weights == (1, 2) and config.report_to == ("tensorboard",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.beta = 1


def test_what_numpy_torch_and_sets_hold_is_welcome():
    config = GRPOConfig(
        reward_weights=np.array([1.0, 2.0]), use_peft=np.True_, beta=torch.tensor(0.5), lora_target_modules={"b", "a"}
    )
    values = config.reward_weights, config.use_peft, config.beta, config.lora_target_modules
    assert values == ((1.0, 2.0), True, 0.5, ("a", "b")) and type(config.use_peft) is bool
    assert json.dumps(dataclasses.asdict(config))


def test_paths_become_text():
    names = ("output_dir", "model_name_or_path", "dataset_name", "resume_from_checkpoint")
    config = GRPOConfig(**{name: Path("runs") / "a" for name in names}, reward_funcs=[Path("own")])
    assert [getattr(config, name) for name in names] == ["runs/a"] * 4 and config.reward_funcs == ("own",)
    assert json.loads(json.dumps(dataclasses.asdict(config)))["output_dir"] == "runs/a"


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"beta": "much"}, "beta must be a number, got 'much'"),
        ({"use_peft": 1}, "use_peft must be true or false, got 1"),
        ({"gradient_checkpointing": 1}, "gradient_checkpointing must be true or false, got 1"),
        ({"output_dir": 7}, r"output_dir must be text \(in quotes\), got 7"),
        ({"num_generations": 2.5}, "num_generations must be a whole number, got 2.5"),
        ({"max_steps": 10**400}, r"max_steps must be a whole number below 2\^63, got inf"),
        ({"max_steps": 2**63}, r"max_steps must be a whole number below 2\^63, got 9.22337e\+18"),
        ({"learning_rate": 10**400}, "learning_rate must be finite, got inf"),
        ({"num_train_epochs": 1e308}, r"num_train_epochs must be in \(0, 1000000\], got 1e\+308"),
        ({"temperature": 1e-40}, "temperature must be at least 1e-30, got 1e-40: the completions of a greedy"),
        ({"eval_num_generations": 2, "eval_temperature": 1e-40}, "eval_temperature must be at least 1e-30"),
    ],
)
def test_values_of_another_type_or_size_are_refused_by_name(settings, match):
    with pytest.raises(ValueError, match=f"^{match}"):
        GRPOConfig(**settings)


@pytest.mark.parametrize(
    "settings", [{"loss_type": "luspo"}, {"loss_type": "cispo"}, {"loss_type": "sapo", "delta": 2.0}]
)
def test_what_the_loss_cannot_combine_is_refused(settings):
    with pytest.raises(ValueError, match=r"luspo|cispo|delta"):
        GRPOConfig(**settings)


def test_the_kl_of_a_run_is_corrected_as_in_trl_but_for_the_full_one():
    assert GRPOConfig(beta=0.1).objective.use_bias_correction_kl
    assert not GRPOConfig(beta=0.1, kl="full").objective.use_bias_correction_kl
    assert not GRPOConfig(beta=0.1, use_bias_correction_kl=False).objective.use_bias_correction_kl
