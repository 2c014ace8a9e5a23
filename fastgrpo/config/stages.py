"""The file of settings of several stages that follow each other, for `python -m fastgrpo.stages`.

all:        what every stage takes that has such a setting
sft:        settings of python -m fastgrpo.sft, which makes the first model
train:      settings of python -m fastgrpo.train, which goes on from it
distill:    settings of python -m fastgrpo.distill, which draws from the trained policy
distilled:  settings of python -m fastgrpo.sft, which learns from what was drawn
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fastgrpo.config import distillation, recipe
from fastgrpo.config.distillation import DistillConfig
from fastgrpo.config.fields import did_you_mean, typed
from fastgrpo.config.settings import GRPOConfig, Settings, check_name
from fastgrpo.config.supervised import SFTConfig

# The sections of the stages in their order -> the settings that a section may have.
STAGES = {"sft": SFTConfig, "train": GRPOConfig, "distill": DistillConfig, "distilled": SFTConfig}
# What follows from the stage before, and where the runs lie.
_RUN = ("output_dir", "resume_from_checkpoint", "overwrite_output_dir")
DECIDED = {
    "sft": _RUN,
    "train": (*_RUN, "model_name_or_path"),
    "distill": ("output", "model"),
    "distilled": (*_RUN, "train_file", "model_name_or_path"),
}


def read_stages(name: str) -> dict[str, dict[str, Any]]:
    """Read and check the settings of all stages."""
    path = recipe.recipe_file(name)
    sections = recipe.read_settings(path)
    wrong = [section for section in sections if section not in ("all", *STAGES)]
    missing = [section for section in STAGES if section not in sections]
    if wrong or missing:
        problem = f"has an unknown section {wrong[0]!r}" if wrong else f"has no section {missing[0]!r}"
        raise ValueError(f"{path} {problem}; its sections are all, {', '.join(STAGES)}")
    for section, settings in sections.items():
        if not isinstance(settings, dict):
            raise ValueError(f"{path}: section {section} must hold lines of `setting: value`, got {settings!r}")
    stages, every = {}, {name for record in STAGES.values() for name in names_of(record)}
    for setting in sections.get("all", {}):
        if setting not in every:
            raise ValueError(f"{path}: all: unknown setting {setting!r}{did_you_mean(str(setting), every)}")
    for section, record in STAGES.items():
        names = names_of(record)
        for setting in sections[section]:
            check_name(setting, record, f"{path}: {section}", ValueError)
        shared = {setting: value for setting, value in sections.get("all", {}).items() if setting in names}
        settings = shared | sections[section]
        decided = [setting for setting in settings if setting in DECIDED[section]]
        if decided:
            raise ValueError(f"{path}: {section}: {decided[0]} follows from the other stages; leave it out")
        types = {field.name: field.type for field in dataclasses.fields(record)}
        stages[section] = {
            name: typed(f"{path}: {section}: {name}", value, types[name]) for name, value in settings.items()
        }
        _check(f"{path}: {section}", section, stages[section])
    return stages


def names_of(record: type[Settings]) -> set[str]:
    """Return the names of the settings of a record."""
    return {field.name for field in dataclasses.fields(record)}


def _check(where, section, settings):
    """Parse the settings as the stage's command will, so that a mistake in the last stage is told before the first."""
    flags = to_flags(settings)
    try:
        if section == "distill":
            distillation.parse(["MODEL", *flags])
        else:
            recipe.parse([*flags, "--output_dir=DIR", "--resume_from_checkpoint=auto"], STAGES[section])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def to_flags(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as arguments of a command."""
    flags = []
    for name, value in settings.items():
        # One word for a single value, which may itself begin with hyphens.
        flags += [f"--{name}", *map(str, value)] if isinstance(value, tuple) else [f"--{name}={value}"]
    return flags
