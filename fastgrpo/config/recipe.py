"""YAML files of settings: `--config FILE`, and the recipes of tasks in recipes/."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from fastgrpo.config.command import Record, parse_flags
from fastgrpo.config.fields import check_name, convert, hints, is_list
from fastgrpo.config.settings import SFTConfig, TrainConfig, TrainingConfig

RECIPES = Path(__file__).parent.parent / "recipes"
KINDS = {"train": "Train a policy with GRPO.", "sft": "Train a policy on given completions."}
FILES = """

--config FILE reads settings from a YAML file with lines `setting: value`. Flags override the file, and the file
overrides the recipe of the task."""
RECIPES_BY_NAME = """ --config NAME reads a recipe of the package: r1, smollm2-gsm8k, smollm2-135m-sums or
smollm2-135m-gym."""
SWEEPS = """

--sweep NAME=VALUE,VALUE makes one run per value of a setting. Repeat it to make one run per combination. --sweep_seeds
SEED,SEED repeats each run with each seed."""
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
Config = TypeVar("Config", bound=TrainingConfig)


def read_yaml(text: str) -> Any:
    """Parse YAML, and refuse duplicate keys."""
    import yaml  # not before a file is read

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            lines = {}
            for key, _ in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines:
                    raise ValueError(f"{name} is given twice, in lines {lines[name]} and {line}; delete one of them")
                lines[name] = line
            return super().construct_mapping(node, deep)

    # 1e-7 is a number in YAML 1.2, and a text for PyYAML.
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except Exception as error:  # its constructors also raise KeyError, AttributeError and others for a value
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read a YAML file with lines `name: value`, without a check of the names."""
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
    return settings


def load_yaml(path: str | Path, record: type[TrainingConfig] = TrainConfig) -> dict[str, Any]:
    """Read and validate a YAML file of settings."""
    settings = read_settings(path)
    command = _command_of(settings)
    if not settings.keys() <= {field.name for field in dataclasses.fields(record)} and command not in (
        None,
        record.command,
    ):
        raise ValueError(
            f"{path} holds settings for python -m fastgrpo.{command}, not for python -m fastgrpo.{record.command}; "
            "give it to that command"
        )
    kinds, defaults = hints(record), {field.name: field.default for field in dataclasses.fields(record)}
    for name in settings:
        check_name(name, record, str(path), ValueError)
    for name, value in settings.items():
        kind = kinds[name]
        while get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        if value == "None" and type(None) in get_args(kind):  # as the help texts and the command line write it
            settings[name] = None
        if value is None and is_list(kinds[name]):
            settings[name] = defaults[name]
    return {name: convert(name, value, kinds[name], f"{path}: ") for name, value in settings.items()}


def _command_of(settings: Mapping[str, Any]) -> str | None:
    """Return the command that has all of these settings, or None."""
    for record in (TrainConfig, SFTConfig):
        if settings.keys() <= {field.name for field in dataclasses.fields(record)}:
            return record.command
    return None


def recipe_file(name: str) -> Path:
    """Return the file of --config: a path, or a recipe of the package."""
    if not name:
        raise ValueError("--config got an empty name; name a YAML file, or a recipe that comes with the package")
    shipped = RECIPES / f"{name}.yaml"
    return shipped if shipped.is_file() and not Path(name).is_file() else Path(name)


def task_defaults(
    task: str, record: type[TrainingConfig] = TrainConfig, argv: Sequence[str] = (), from_file: Collection[str] = ()
) -> dict[str, Any]:
    """Return the settings of a task's recipe. Its weights of rewards are dropped if the user names other rewards."""
    path = RECIPES / (f"{task}.yaml" if record is TrainConfig else f"{task}-{record.command}.yaml")
    own = load_yaml(path, record) if path.exists() else {}
    named = any(argument.partition("=")[0].replace("-", "_") == "__reward_funcs" for argument in argv)
    if named or "reward_funcs" in from_file:
        own.pop("reward_weights", None)
    return own


def parse(argv: list[str], record: type[Config] = TrainConfig) -> Config:
    """Parse the command line of a training. Flags override --config FILE, which overrides the task's recipe."""
    argv, files = take_flags(argv, "--config")
    if len(files) > 1:
        raise ValueError("--config is given twice; put all settings into one file")
    from_file = load_yaml(recipe_file(files[0]), record) if files else {}
    argv, stated = take_flag(argv, "--task")
    task = from_file.get("task", "arithmetic") if stated is None else stated
    config = parse_flags(
        record,
        argv,
        prog=f"python -m fastgrpo.{record.command}",
        description=KINDS[record.command] + FILES + (RECIPES_BY_NAME + SWEEPS if record is TrainConfig else ""),
        defaults={**task_defaults(task, record, argv, from_file), **from_file, "task": task},
    )
    if stated is None and "task" not in from_file and config.model_name_or_path and getattr(config, "train_file", None):
        raise ValueError(
            "--train_file with a model also needs --task, for held-out rows and default settings; pass for example "
            "--task dataset"
        )
    return config


def parse_for_rows(record: type[Record], argv: list[str], *, defaults: Mapping[str, Any], **names: Any) -> Record:
    """Parse the flags of a command that reads held-out rows: all rows of a .jsonl file, unless a split is named."""
    config = parse_flags(record, argv, defaults=defaults, **names)
    if (config.dataset_name or "").endswith(".jsonl"):
        return parse_flags(record, argv, defaults={**defaults, "dataset_test_split": "train"}, **names)
    return config


def take_flag(argv: list[str], name: str) -> tuple[list[str], str | None]:
    """Remove a flag with its value from the arguments."""
    rest, values = take_flags(argv, name)
    return rest, values[-1] if values else None


def take_flags(argv: list[str], name: str) -> tuple[list[str], list[str]]:
    """Remove every use of a flag with its value from the arguments."""
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
