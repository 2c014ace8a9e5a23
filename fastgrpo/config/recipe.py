"""YAML files of settings: a person's own (`--config FILE`), and those that tasks ship in recipes/."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from fastgrpo.config.command import parse_flags
from fastgrpo.config.fields import typed
from fastgrpo.config.settings import GRPOConfig, Settings, check_name

RECIPES = Path(__file__).parent.parent / "recipes"
TRAINING = """Train a policy by GRPO.

A flag overrides the YAML file of --config FILE, which has a line `setting: value` for each setting. The file overrides
the recipe that the task ships.

--sweep NAME=VALUE,VALUE makes a run for each value of a setting, and may be given several times: then there is a run
for each combination. --sweep_seeds SEED,SEED makes each of them with each seed, and --sweep_jobs N makes N runs at a
time."""
Record = TypeVar("Record", bound=Settings)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a file of settings.

    Args:
        path: A YAML file with a line `setting: value` for each of some settings of `GRPOConfig`.

    Returns:
        The settings by name, each of its field's type.

    Raises:
        ValueError: There is no such file, it is not YAML, it gives a setting twice, or a name is not a setting (the
            nearest one is named).
    """
    from fastgrpo.config.plain_yaml import read_yaml

    try:
        settings = read_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise ValueError(f"{problem}: {path}; --config takes a YAML file of settings") from None
    except ValueError as error:
        raise ValueError(f"{path} is not YAML that can be read: {error}") from None
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold lines of `setting: value`, got a {type(settings).__name__}")
    types = {field.name: field.type for field in dataclasses.fields(GRPOConfig)}
    for name in settings:
        check_name(name, GRPOConfig, str(path), ValueError)
    return {name: typed(f"{path}: {name}", value, types[name]) for name, value in settings.items()}


def unchecked(record: type[Record], settings: dict[str, Any]) -> Record:
    """Make a record of settings without checking them. It is checked once flags have completed it.

    Args:
        record: The class of the record.
        settings: Values by name; what is not among them keeps its default, and a setting that must be given stays
            missing.

    Returns:
        The record.
    """
    import tyro

    config = object.__new__(record)
    for field in dataclasses.fields(record):
        default = tyro.MISSING if field.default is dataclasses.MISSING else field.default
        object.__setattr__(config, field.name, settings.get(field.name, default))
    return config


def task_defaults(task: str) -> dict[str, Any]:
    """Return the settings that a task recommends.

    Args:
        task: The task's name.

    Returns:
        The settings of recipes/TASK.yaml by name; empty where the task ships none.
    """
    path = RECIPES / f"{task}.yaml"
    return load_yaml(path) if path.exists() else {}


def parse(argv: list[str]) -> GRPOConfig:
    """Read the command line of training. A flag overrides --config FILE, and the file overrides the task's recipe.

    Args:
        argv: The arguments.

    Returns:
        The settings.

    Raises:
        ValueError: A setting that is not allowed, or a flag that does not exist (the nearest one is named).
    """
    argv, config_file = take_flag(argv, "--config")
    from_file = load_yaml(config_file) if config_file else {}
    argv, task = take_flag(argv, "--task")
    task = task or from_file.get("task", "arithmetic")
    defaults = unchecked(GRPOConfig, {**task_defaults(task), **from_file, "task": task})
    return parse_flags(GRPOConfig, argv, prog="python -m fastgrpo.train", description=TRAINING, default=defaults)


def take_flag(argv: list[str], name: str) -> tuple[list[str], str | None]:
    """Take a flag with one value out of the arguments.

    Args:
        argv: The arguments.
        name: The flag, with its hyphens.

    Returns:
        The arguments without `name VALUE` or `name=VALUE`, and the last value, which is None where the flag is not
        there.

    Raises:
        ValueError: The flag stands at the end, without a value.
    """
    rest, values = take_flags(argv, name)
    return rest, values[-1] if values else None


def take_flags(argv: list[str], name: str) -> tuple[list[str], list[str]]:
    """Take every use of a flag with one value out of the arguments.

    Args:
        argv: The arguments.
        name: The flag, with its hyphens.

    Returns:
        The arguments without `name VALUE` or `name=VALUE`, and the values in their order.

    Raises:
        ValueError: The flag stands at the end, without a value.
    """
    rest, values, wanted = [], [], False
    for argument in argv:
        if wanted:
            values.append(argument)
            wanted = False
        elif argument == name:
            wanted = True
        elif argument.startswith(name + "="):
            values.append(argument.partition("=")[2])
        else:
            rest.append(argument)
    if wanted:
        raise ValueError(f"{name} needs a value")
    return rest, values
