"""YAML files of settings: a user's (`--config FILE`), and those that tasks ship in recipes/."""

import dataclasses
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin

from fastgrpo.config.command import parse_flags
from fastgrpo.config.settings import GRPOConfig, check_name

RECIPES = Path(__file__).parent.parent / "recipes"


def load_yaml(path):
    """A recipe file -> dict of settings.

    Raises:
        ValueError: no such file, not YAML, or a name that is no setting (the nearest is named).
    """
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise ValueError(f"{problem}: {path}; --config takes a YAML file of settings") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold lines of `setting: value`, got a {type(settings).__name__}")
    types = {field.name: field.type for field in dataclasses.fields(GRPOConfig)}
    for name in settings:
        check_name(name, path, ValueError)
    return {name: _typed(f"{path}: {name}", value, types[name]) for name, value in settings.items()}


def _typed(where, value, kind):
    """A value out of YAML as one of a setting's type. Raises ValueError where it is of another."""
    if isinstance(kind, UnionType):  # with None
        return None if value is None else _typed(where, value, get_args(kind)[0])
    if get_origin(kind) is tuple:
        return tuple(_typed(where, item, get_args(kind)[0]) for item in (value if isinstance(value, list) else [value]))
    if kind in (int, float) and not isinstance(value, bool):
        try:  # YAML 1.1 reads 5e-5, without a point, as a string
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{where} must be a number, got {value!r}") from None
        if kind is int and not number.is_integer():
            raise ValueError(f"{where} must be a whole number, got {value!r}")
        return kind(value) if isinstance(value, int) else kind(number)
    if not isinstance(value, kind):
        what = {bool: "true or false", str: "text (in quotes)"}.get(kind, "a number")
        raise ValueError(f"{where} must be {what}, got {value!r}")
    return value


def unchecked(settings):
    """A `GRPOConfig` that nobody has checked: flags come on top, and then it is."""
    config = object.__new__(GRPOConfig)
    for field in dataclasses.fields(GRPOConfig):
        object.__setattr__(config, field.name, settings.get(field.name, field.default))
    return config


def task_defaults(task):
    """Settings of recipes/TASK.yaml, where the task ships one."""
    path = RECIPES / f"{task}.yaml"
    return load_yaml(path) if path.exists() else {}


def parse(argv):
    """Settings from the command line. Flags go before --config FILE, which goes before the task's recipe.

    Raises:
        ValueError: a setting that is out of range, or a flag that does not exist (the nearest is named).
    """
    argv, config_file = _take_flag(argv, "--config")
    from_file = load_yaml(config_file) if config_file else {}
    task = _take_flag(argv, "--task")[1] or from_file.get("task", "arithmetic")
    defaults = unchecked({**task_defaults(task), **from_file, "task": task})
    return parse_flags(GRPOConfig, argv, prog="python -m fastgrpo.train", description=__doc__, default=defaults)


def _take_flag(argv, name):
    """The arguments without `name VALUE` or `name=VALUE`, and the value (None where it is not there)."""
    rest, value, wanted = [], None, False
    for argument in argv:
        if wanted:
            value, wanted = argument, False
        elif argument == name:
            wanted = True
        elif argument.startswith(name + "="):
            value = argument.partition("=")[2]
        else:
            rest.append(argument)
    if wanted:
        raise ValueError(f"{name} needs a value")
    return rest, value
