"""Settings: types, bounds, choices and conditions, and the objective made from them."""

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

from fastgrpo.config.fields import AutoCount, Keywords, allowed, bare, convert, hints, keywords
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.config.validation import CONDITIONS, RESUME_INEXACT, RESUME_MAY_CHANGE
from fastgrpo.loss.objective import Objective

KINDS = hints(GRPOConfig)
FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}
KNOBS = {field.name for field in dataclasses.fields(Objective)} & set(FIELDS)
# The settings with which a condition holds, and with which it does not, by the first words of the condition.
CASES = {
    "log_completions": ({"log_completions": True}, {}), "task is reasoning_gym": ({"task": "reasoning_gym"}, {}),
    "report_to": ({"report_to": ("trackio",)}, {"report_to": ("tensorboard",)}), "use_peft": ({"use_peft": True}, {}),
    "lr_scheduler_type": ({}, {"lr_scheduler_type": "constant"}), "max_steps": ({}, {"max_steps": 3}),
    "metric_for_best_model": ({"metric_for_best_model": "reward"}, {}),
    "importance_sampling_mode": ({"importance_sampling_mode": "token_mask"}, {}),
    "loss_type is sapo": ({"loss_type": "sapo"}, {}), "loss_type is vespo": ({"loss_type": "vespo"}, {}),
    "beta": ({"beta": 0.1}, {}), "sync_ref_model": ({"beta": 0.1, "sync_ref_model": True}, {}),
    "rollout_backend is neither": ({}, {"rollout_backend": "hf"}),
    "rollout_backend is vllm": ({"rollout_backend": "vllm", "importance_sampling_mode": "token_mask"}, {}),
    "max_staleness": (
        {"rollout_backend": "vllm", "importance_sampling_mode": "token_mask", "max_staleness": 2}, {"max_staleness": 0}
    ),
    "use_adaptive_entropy": ({"use_adaptive_entropy": True}, {}),
}  # fmt: skip


def bounds(name):
    """The bounds of a setting: {"ge": 0, "lt": 1}, for example."""
    found, waiting = {}, [KINDS[name]]
    while waiting:
        part = waiting.pop()
        waiting += [*getattr(part, "metadata", ()), *get_args(part)]
        found |= {key: getattr(part, key) for key in ("ge", "gt", "le", "lt") if hasattr(part, key)}
    return found


def outside(name):
    """Values outside of a setting's bounds, and values that are not numbers. At 3e38, adding 1 has no effect."""
    for key, bound in bounds(name).items():
        yield {"ge": bound - max(1, abs(bound)), "le": bound + max(1, abs(bound))}.get(key, bound)
    yield from (math.nan, math.inf)


def another(field):
    kind = bare(KINDS[field.name])
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != field.default)
    if kind is bool:
        return not field.default
    if get_origin(kind) is list:
        return ("q_proj",)
    if kind in (int, float):
        default = field.default or 0
        return next(value for value in (default + 1, default / 2) if fits(field, value))
    return "another"


def fits(field, value):
    try:
        convert(field.name, value, KINDS[field.name])
    except ValueError:
        return False
    return True


def refused(name, **settings):
    """These settings are refused with a line that begins with the name of one."""
    with pytest.raises(ValueError, match=f"^{name} must be ") as error:
        GRPOConfig(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in FIELDS if bounds(name)])
def test_rejects_values_out_of_bounds(name):
    for value in outside(name):
        refused(name, **{name: (1.0, value) if get_origin(bare(KINDS[name])) is list else value})


def test_rejects_unknown_choices():
    chosen = [name for name in FIELDS if allowed(KINDS[name]).startswith(("one of", "any of"))]
    assert {"loss_type", "report_to", "dtype"} < set(chosen)
    for name in chosen:
        refused(name, **{name: "another"})


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_setting_without_effect_is_refused(name):
    (text, _), value = CONDITIONS[name], another(FIELDS[name])
    (holds, holds_not) = next(case for start, case in CASES.items() if text.startswith(start))
    assert getattr(GRPOConfig(**{**holds, name: value}), name) == value
    with pytest.raises(ValueError, match=f"^{name} has an effect only if {re.escape(text)}"):
        GRPOConfig(**{**holds_not, name: value})


def test_rejects_none_where_it_has_no_meaning():
    for name, kind in KINDS.items():
        takes_none = kind == AutoCount or type(None) in get_args(kind) or get_origin(bare(kind)) is list
        if not takes_none and name != "disable_tqdm":
            refused(name, **{name: None})


def test_reports_all_wrong_values_at_once():
    with pytest.raises(ValueError, match=r"^beta must be .*\nmax_steps must be .*"):
        GRPOConfig(max_steps=2.5, beta="much")


@pytest.mark.parametrize("settings", [
    {"beta": "much"}, {"use_peft": 7}, {"gradient_checkpointing": 7}, {"output_dir": 7}, {"num_generations": 2.5},
    {"max_steps": 10**400}, {"max_steps": 2**63}, {"learning_rate": 10**400}, {"num_train_epochs": 1e308},
    {"temperature": 1e-40}, {"beta": True}, {"learning_rate": True}, {"epsilon_high": True}, {"output_dir": "a\0b"},
    {"output_dir": "a\udcff"}, {"reward_funcs": ["m:f", "m:\0"]}, {"system_prompt": "\0"}, {"max_steps": True},
])  # fmt: skip
def test_values_of_another_type_or_size_are_refused(settings):
    refused(*settings, **settings)


def test_resume_rules_name_existing_settings():
    assert FIELDS.keys() >= RESUME_MAY_CHANGE | RESUME_INEXACT and not RESUME_MAY_CHANGE & RESUME_INEXACT


def test_the_loss_and_its_settings_allow_the_same():
    assert len(KNOBS) == len(dataclasses.fields(Objective))
    own = {field.name: field.default for field in dataclasses.fields(Objective)}
    others = {"max_completion_length", "importance_sampling_mode", "use_bias_correction_kl"}  # see docs/objectives.md
    for name in KNOBS - others:
        assert own[name] == FIELDS[name].default, name
        kind = bare(KINDS[name])
        for value in outside(name) if kind in (int, float) else ():
            if value != math.inf:  # an infinite bound is no bound
                with pytest.raises(ValueError, match=f"^{name} must be "):
                    Objective(**{name: value})
        for choice in get_args(kind) if get_origin(kind) is Literal else ():
            if choice != "dr_grpo":  # it needs a second knob
                assert getattr(Objective(**{name: choice}), name) == choice


def test_the_objective_gets_every_knob():
    config = GRPOConfig(
        loss_type="dr_grpo", epsilon_high=0.28, delta=4.0, beta=0.1, kl="k1", max_completion_length=77,
        importance_sampling_level="sequence", importance_sampling_mode="token_mask", importance_sampling_clip_max=2.0,
    )  # fmt: skip
    for name in KNOBS:
        assert getattr(config.objective, name) == getattr(config, name), name
    assert GRPOConfig().objective.importance_sampling_mode == Objective().importance_sampling_mode


def test_bias_correction_of_the_kl_follows_trl_for_estimators_with_biased_gradients():
    assert GRPOConfig(beta=0.1).objective.use_bias_correction_kl
    assert not any(GRPOConfig(beta=0.1, kl=kl).objective.use_bias_correction_kl for kl in ("k2", "abs", "full"))
    assert not GRPOConfig(beta=0.1, use_bias_correction_kl=False).objective.use_bias_correction_kl


def test_settings_are_a_frozen_dataclass():
    config = GRPOConfig("out", beta=0.1, reward_weights=[1, 2], report_to="tensorboard")
    assert (config.output_dir, config.reward_weights, config.report_to) == ("out", (1, 2), ("tensorboard",))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == dataclasses.replace(config) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.beta = 1
    with pytest.raises(TypeError, match=r"decorate Own by fastgrpo.config.fields.settings_class"):
        dataclasses.make_dataclass("Own", ["name"], bases=(GRPOConfig,), frozen=True, kw_only=True)(name="x")


def test_accepts_numpy_torch_sets_and_paths():
    config = GRPOConfig(
        reward_weights=np.array([1.0, 2.0]), use_peft=np.True_, beta=torch.tensor(0.5), lora_target_modules={"b", "a"},
        output_dir=Path("runs") / "a", reward_funcs=[Path("own")],
    )  # fmt: skip
    values = config.reward_weights, config.use_peft, config.beta, config.lora_target_modules, config.reward_funcs
    assert values == ((1.0, 2.0), True, 0.5, ("a", "b"), ("own",)) and type(config.use_peft) is bool
    assert json.loads(json.dumps(dataclasses.asdict(config)))["output_dir"] == "runs/a"


def test_keyword_arguments_become_json_text():
    for value in ({"a": 1, "b": [True, None]}, '{"a": 1, "b": [true, null]}'):
        assert convert("extra", value, Keywords | None) == '{"a": 1, "b": [true, null]}'
    assert convert("extra", None, Keywords | None) is None
    assert keywords("extra", '{"a": 1}') == {"a": 1} and keywords("extra", None) == {}
    for value in ("{'a': 1}", {"a": object()}, "[1]", 7):
        with pytest.raises(ValueError, match=r"^extra must be a dictionary"):
            convert("extra", value, Keywords | None)
