"""All settings: defaults, the record, and every bound, choice and condition that a field states."""

import copy
import dataclasses
import json
import math
import pickle
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch

from fastgrpo.config.fields import allowed, bare, convert, hints
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.config.validation import CONDITIONS, RESUME_INEXACT, RESUME_MAY_CHANGE
from fastgrpo.loss.objective import Objective

KINDS = hints(GRPOConfig)
FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}
KNOBS = {field.name for field in dataclasses.fields(Objective)} & set(FIELDS)
# The condition of some settings, in words -> settings with which it holds, and with which it does not.
CASES = {
    "log_completions is True": ({"log_completions": True}, {}),
    "report_to has wandb or trackio": ({"report_to": ("trackio",)}, {"report_to": ("tensorboard",)}),
    "use_peft is True": ({"use_peft": True}, {}),
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
    "rollout_backend is fast or eager": ({}, {"rollout_backend": "hf"}),
    "use_adaptive_entropy is True": ({"use_adaptive_entropy": True}, {}),
}


def bounds(name):
    """The bounds of a setting: {"ge": 0, "lt": 1}, for example."""
    found, waiting = {}, [KINDS[name]]
    while waiting:
        part = waiting.pop()
        waiting += [*getattr(part, "metadata", ()), *get_args(part)]
        found |= {key: getattr(part, key) for key in ("ge", "gt", "le", "lt") if hasattr(part, key)}
    return found


def outside(name):
    """Numbers outside of a setting's bounds, and what is no number. At 3e38, 1 more would be no other number."""
    for key, bound in bounds(name).items():
        yield {"ge": bound - max(1, abs(bound)), "le": bound + max(1, abs(bound))}.get(key, bound)
    yield from (math.nan, math.inf)


def another(field):
    """A value that a setting may have and that is not its default."""
    kind = bare(KINDS[field.name])
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != field.default)
    if kind is bool:
        return not field.default
    if get_origin(kind) is list:
        return ("q_proj",)
    if kind in (int, float):
        default = field.default or 0
        return next(v for v in (default + 1, default / 2) if not refused_by_itself(field, v))
    return "another"


def refused_by_itself(field, value):
    try:
        convert(field.name, value, KINDS[field.name])
    except ValueError:
        return True
    return False


def test_unstated_defaults_are_trls():
    config = GRPOConfig()
    assert (config.beta, config.epsilon, config.num_generations, config.loss_type) == (0.0, 0.2, 8, "dapo")
    assert (config.learning_rate, config.temperature, config.scale_rewards) == (1e-6, 1.0, "group")
    assert (config.max_completion_length, config.logging_steps, config.max_grad_norm) == (512, 10, 1.0)
    # The rest is compared with TRL's own fields in test_trl_names.py.


@pytest.mark.parametrize("name", [name for name in FIELDS if bounds(name)])
def test_every_bound_is_held(name):
    several = get_origin(bare(KINDS[name])) is list
    for value in outside(name):
        with pytest.raises(ValueError, match=f"^{name} must be "):
            GRPOConfig(**{name: (1.0, value) if several else value})


@pytest.mark.parametrize("name", [name for name in FIELDS if allowed(KINDS[name]).startswith("one of")])
def test_every_choice_is_held(name):
    with pytest.raises(ValueError, match=f"^{name} must be {allowed(KINDS[name])}, got 'another'$"):
        GRPOConfig(**{name: "another"})


@pytest.mark.parametrize("name", CONDITIONS)
def test_every_condition_is_held(name):
    (text, _), value = CONDITIONS[name], another(FIELDS[name])
    holds, holds_not = CASES[text]
    assert getattr(GRPOConfig(**{**holds, name: value}), name) == value
    with pytest.raises(ValueError, match=re.escape(f"{name} has an effect only where {text}; leave it out")):
        GRPOConfig(**{**holds_not, name: value})


def test_every_setting_must_be_given_where_none_means_nothing():
    for name, kind in KINDS.items():
        if type(None) not in get_args(kind) and get_origin(bare(kind)) is not list and name != "disable_tqdm":
            with pytest.raises(ValueError, match=f"^{name} must be .*, got None"):
                GRPOConfig(**{name: None})


def test_every_help_is_sentences_of_its_own():
    helps = {name: field.metadata["help"] for name, field in FIELDS.items()}
    assert len(set(helps.values())) == len(helps)
    for name, text in helps.items():
        assert re.fullmatch(r"[A-Z].{20,}\.", text), f"{name}: {text}"
        assert not re.match(r"(Of|And|At|Also|To|As) ", text), f"{name}: {text}"
        assert "%" not in text, "argparse would format it"


def test_what_a_resumed_run_may_change_are_settings():
    assert FIELDS.keys() >= RESUME_MAY_CHANGE and FIELDS.keys() >= RESUME_INEXACT
    assert not RESUME_MAY_CHANGE & RESUME_INEXACT


def test_the_loss_and_its_settings_allow_the_same():
    """The loss checks its knobs again, as a library of its own."""
    assert len(KNOBS) == len(dataclasses.fields(Objective))
    own = {field.name: field.default for field in dataclasses.fields(Objective)}
    others = {"max_completion_length", "importance_sampling_mode", "use_bias_correction_kl"}  # see docs/objectives.md
    for name in KNOBS - others:
        assert own[name] == FIELDS[name].default, name
        kind = bare(KINDS[name])
        for value in outside(name) if kind in (int, float) else ():
            if value != math.inf:  # an infinite bound is no bound
                with pytest.raises(ValueError):
                    Objective(**{name: value})
        for choice in get_args(kind) if get_origin(kind) is Literal else ():
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
    names = ("output_dir", "model_name_or_path", "resume_from_checkpoint")
    config = GRPOConfig(**{name: Path("runs") / "a" for name in names}, reward_funcs=[Path("own")])
    assert [getattr(config, name) for name in names] == ["runs/a"] * 3 and config.reward_funcs == ("own",)
    assert json.loads(json.dumps(dataclasses.asdict(config)))["output_dir"] == "runs/a"


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"beta": "much"}, "beta must be a number, got 'much'"),
        ({"use_peft": 7}, "use_peft must be true or false, got 7"),
        ({"gradient_checkpointing": 7}, "gradient_checkpointing must be one of auto, True, False, got 7"),
        ({"output_dir": 7}, r"output_dir must be text \(in quotes\), got 7"),
        ({"num_generations": 2.5}, "num_generations must be a whole number, got 2.5"),
        ({"max_steps": 10**400}, r"max_steps must be a whole number below 2\^63, got 1000"),
        ({"max_steps": 2**63}, r"max_steps must be a whole number below 2\^63, got 9223372036854775808"),
        ({"learning_rate": 10**400}, "learning_rate must be a number, got 1000"),
        ({"num_train_epochs": 1e308}, r"num_train_epochs must be in \(0, 1000000\], got 1e\+308"),
        ({"temperature": 1e-40}, "temperature must be at least 1e-30, got 1e-40"),
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


def test_a_truth_value_is_no_number_and_nul_is_no_text():
    for name in ("beta", "learning_rate", "epsilon_high"):
        with pytest.raises(ValueError, match=f"^{name} must be a number, got True$"):
            GRPOConfig(**{name: True})
    for settings in ({"output_dir": "a\0b"}, {"reward_funcs": ["m:f", "m:\0"]}, {"system_prompt": "\0"}):
        with pytest.raises(ValueError, match=f"^{next(iter(settings))} must be text without NUL characters"):
            GRPOConfig(**settings)
    with pytest.raises(ValueError, match=r"^f.yaml: beta must be a number, got True$"):
        convert("beta", True, KINDS["beta"], "f.yaml: ")
