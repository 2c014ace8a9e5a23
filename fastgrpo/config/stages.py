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
from fastgrpo.config.settings import GRPOConfig, Settings, check_name
from fastgrpo.config.supervised import SFTConfig

# The sections of the stages in their order -> the settings that a section may have.
STAGES = {"sft": SFTConfig, "train": GRPOConfig, "distill": DistillConfig, "distilled": SFTConfig}
# What follows from the stage before, and where the runs lie.
DECIDED = {
    "sft": ("output_dir",),
    "train": ("output_dir", "model_name_or_path"),
    "distill": ("output", "model"),
    "distilled": ("output_dir", "train_file", "model_name_or_path"),
}


def read_stages(name: str) -> dict[str, dict[str, Any]]:
    """Read and check the settings of all stages.

    Args:
        name: A YAML file, or the name of one that comes with the package.

    Returns:
        The settings by name of each section of `STAGES`, with those of `all` that its command has.

    Raises:
        ValueError: The file cannot be read, its sections are not these, or a setting is not allowed.
    """
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
    everywhere, stages = sections.get("all", {}), {}
    for setting in everywhere:
        if not any(setting in names_of(record) for record in STAGES.values()):
            check_name(setting, GRPOConfig, f"{path}: all", ValueError)
    for section, record in STAGES.items():
        for setting in sections[section]:
            check_name(setting, record, f"{path}: {section}", ValueError)
            if setting in DECIDED[section]:
                raise ValueError(f"{path}: {section}: {setting} follows from the other stages; leave it out")
        shared = {setting: value for setting, value in everywhere.items() if setting in names_of(record)}
        stages[section] = shared | sections[section]
        _check(f"{path}: {section}", section, stages[section])
    return stages


def names_of(record: type[Settings]) -> set[str]:
    """Return the names of the settings of a record.

    Args:
        record: The class of the record.

    Returns:
        The names.
    """
    return {field.name for field in dataclasses.fields(record)}


def _check(where, section, settings):
    """Parse the settings as the stage's command will, so that a mistake in the last stage is told before the first."""
    flags = to_flags(settings)
    try:
        if section == "distill":
            distillation.parse(["MODEL", *flags])
        else:
            recipe.parse(flags, STAGES[section])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def to_flags(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as arguments of a command.

    Args:
        settings: Values by name, as YAML has them.

    Returns:
        The arguments.
    """
    flags = []
    for name, value in settings.items():
        flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags
