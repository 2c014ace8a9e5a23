"""Settings as pydantic dataclasses with a docstring under each field, and the shared types of fields.

    max_prompts: Annotated[int, Field(ge=1)] | None = None
    \"\"\"Largest number of prompts. None takes all of them.\"\"\"

`dataclasses.fields`, `replace` and `asdict` work on the records, and so do tyro and transformers' HfArgumentParser,
which read the type of a field without `Annotated`, and its help from the metadata.
"""

import dataclasses
import difflib
import enum
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

import pydantic
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

Item = TypeVar("Item")
Record = TypeVar("Record", bound=type)


def plain(value: Any) -> Any:
    """Turn numbers of NumPy and torch, paths, enums and sets into plain Python values."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    return value.tolist() if hasattr(value, "tolist") else value


def keywords(name: str, value: Any) -> dict[str, Any]:
    """Read keyword arguments: a dictionary, or its JSON text."""
    try:
        value = json.loads(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a dictionary of JSON values, or its JSON text: {error}") from None
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dictionary or its JSON text, got {value!r}")
    return value or {}


def _listed(value):
    """Return a list; a single value becomes a list of one."""
    value = plain(value)
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else [value]


def _whole(value):
    """Read a whole number, also in the form 1e3, which PyYAML reads as text."""
    value = float(value) if isinstance(value, str) and re.fullmatch(r"\s*[\d.]+e\+?\d+\s*", value, re.I) else value
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) >= 2**63):
        raise ValueError(f"must be a whole number below 2^63, got {str(value)[:40]}")
    return value


Several = Annotated[list[Item], BeforeValidator(_listed), AfterValidator(tuple)]  # a tuple, or a single value
Keywords = Annotated[str, BeforeValidator(lambda value: json.dumps(keywords("", value)))]  # JSON text of a dictionary
Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=1)]
# None means that the run chooses; `auto` is another word for it. HfArgumentParser supports no union with Literal.
AutoCount = Annotated[Count | None, BeforeValidator(lambda value: None if value == "auto" else value)]
Size = Annotated[Whole, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[Whole, Field(ge=0, le=2**32 - 1)]  # NumPy takes no other
Temperature = Annotated[float, Field(ge=1e-30)]  # logits are divided by it; fp32 holds the quotients


def each_of(*choices: str) -> Any:
    """Make the type of a list of these choices. HfArgumentParser does not support a list of Literal."""

    def check(item):
        if item not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {item!r}")
        return item

    return Several[Annotated[str, AfterValidator(check), Literal[choices]]]


CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings_class(record: Record) -> Record:
    """Decorate a class of settings: make it a frozen pydantic dataclass with readable errors.

    An unknown name is a TypeError that suggests the nearest. Wrong values are a ValueError with one line each.
    """
    record = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=CONFIG)(record)
    for field in dataclasses.fields(record):
        if not field.metadata:
            help = record.__pydantic_fields__[field.name].description or ""
            field.metadata = MappingProxyType({"help": " ".join(help.split())})
    checked = record.__init__

    def __setattr__(self, name, value):
        raise dataclasses.FrozenInstanceError(f"settings do not change: pass {name} to {type(self).__name__}()")

    record.__setattr__ = __setattr__

    @functools.wraps(checked)
    def __init__(self, *args, **stated):
        if args:
            if len(args) > 1 or "output_dir" in stated:
                raise TypeError("give settings by name; only output_dir may come first, without its name")
            stated["output_dir"] = args[0]
        kinds = hints(type(self))
        stated = getattr(self, "translated", dict)(stated)
        for name in stated:
            check_name(name, type(self), type(self).__name__, TypeError, getattr(self, "other_names", ()))
        try:
            given = {
                name: _readable(name, value, kinds[name])
                for name, value in stated.items()
                if value is not None or not is_list(kinds[name])
            }
            checked(self, **given)
        except ValidationError as error:
            raise ValueError(told(error, kinds)) from None

    record.__init__ = __init__
    return record


def _readable(name, value, kind):
    """Make a value plain. Refuse what pydantic accepts: a boolean for a number; NUL or lone surrogates in a text."""
    value = plain(value)
    if isinstance(value, bool) and bare(kind) is float:
        raise ValueError(f"{name} must be a number, got {value}")
    for text in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(text, str) and re.search("[\0\ud800-\udfff]", text):  # lone surrogates: not UTF-8
            raise ValueError(f"{name} must be text in UTF-8 without NUL characters, got {value!a:.80}")
    return value


def is_list(kind: Any) -> bool:
    """Return whether a setting is a list. For a list, None means the default, as in HfArgumentParser."""
    return get_origin(bare(kind)) is list


# Prefix of a pydantic error type -> the required value.
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text (in quotes)",
    "finite": "finite",
}


def told(error: ValidationError, kinds: Mapping[str, Any], where: str = "") -> str:
    """Return one line per mistake: the setting, the required value, and the value given."""
    lines = []
    for mistake in error.errors(include_url=False):
        type_, name = mistake["type"], str(next(iter(mistake["loc"]), ""))
        if type_ == "value_error":  # raised by our own validators; a rule about several settings has no location
            lines.append(f"{where}{name} {str(mistake['ctx']['error']).strip()}".strip())
        elif type_ == "missing":
            lines.append(f"{where}{name} must be given")
        else:
            words = _WANTED.get(type_.partition("_")[0]) or allowed(kinds[name]) or mistake["msg"]
            lines.append(f"{where}{name} must be {words}, got {repr(mistake['input'])[:80]}")
    return "\n".join(lines)


@functools.cache
def hints(record: type) -> dict[str, Any]:
    """Return the type of each setting, with its annotations."""
    kinds = get_type_hints(record, include_extras=True)
    return {field.name: kinds[field.name] for field in dataclasses.fields(record)}


def convert(name: str, value: Any, kind: Any, where: str = "") -> Any:
    """Convert the value of a setting to its type. Errors start with `where` and the name."""
    held = pydantic.create_model("Held", __config__=ConfigDict(allow_inf_nan=False), **{name: (kind, ...)})
    try:
        return getattr(held.model_validate({name: _readable(f"{where}{name}", value, kind)}), name)
    except ValidationError as error:
        raise ValueError(told(error, {name: kind}, where)) from None


def bare(kind: Any) -> Any:
    """Return a type without None and `Annotated`."""
    while get_origin(kind) in (Annotated, Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return kind


def allowed(kind: Any) -> str:
    """Describe the values that a type allows besides None; empty for any value."""
    choices, bounds = None, {}
    waiting = [kind]
    while waiting:
        part = waiting.pop()
        if get_origin(part) is Literal:
            choices = get_args(part)
        elif isinstance(part, FieldInfo):
            waiting += part.metadata
        elif isinstance(part, (Ge, Gt, Le, Lt)):
            bounds[type(part)] = getattr(part, type(part).__name__.lower())
        elif get_origin(part) is not None:
            waiting += get_args(part)
    if choices is not None:
        choices = (None, *choices) if type(None) in get_args(kind) else choices
        number = "any of " if get_origin(bare(kind)) is list else "one of "
        return number + ", ".join(map(str, choices))
    low = next((f"{sign}{bounds[kind]}" for kind, sign in ((Ge, "["), (Gt, "(")) if kind in bounds), None)
    high = next((f"{bounds[kind]}{sign}" for kind, sign in ((Le, "]"), (Lt, ")")) if kind in bounds), None)
    if low and high:
        return f"in {low}, {high}"
    if low:
        return "positive" if low == "(0" else f"above {low[1:]}" if low[0] == "(" else f"at least {low[1:]}"
    return "" if not high else f"below {high[:-1]}" if high[-1] == ")" else f"at most {high[:-1]}"


def own_fields(cls: type) -> list[dataclasses.Field]:
    """Return the fields that a section defines itself."""
    added = inspect.get_annotations(cls)
    return [field for field in dataclasses.fields(cls) if field.name in added] if dataclasses.is_dataclass(cls) else []


def sections_of(record: type) -> list[type]:
    """Return the sections of a record in the order of its fields."""
    return [cls for cls in reversed(record.__mro__) if own_fields(cls)]


TITLES = {"SFTConfig": "Supervised training", "SelectionConfig": "Distillation"}


def title(section: type) -> str:
    """Return the title of a section."""
    return (
        TITLES.get(section.__name__)
        or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", section.__name__.removesuffix("Config")).capitalize()
    )


def check_name(name: Any, record: type, where: str, error: type[Exception], others: Iterable[str] = ()) -> None:
    """Raise `error` for a name that is not a setting of a record."""
    if not isinstance(name, str):
        raise error(f"{where}: the name of a setting must be text, got {name!r}")
    names = [field.name for field in dataclasses.fields(record)]
    if name not in names:
        raise error(f"{where}: unknown setting {name!r}{did_you_mean(name, [*names, *others])}")


# Names of other trainers -> our settings.
_ELSEWHERE = {
    "num_generations": "g n group_size n_samples num_samples num_samples_per_prompt n_samples_per_prompt num_rollouts",
    "eval_num_generations": "k g n group_size n_samples num_samples",
    "beta": "kl_coef kl_coeff kl_weight kl_loss_coef kl_beta kl_penalty",
    "epsilon": "clip clip_eps clip_epsilon clip_range clip_ratio cliprange eps_clip",
    "epsilon_high": "clip_high clip_ratio_high clip_eps_high eps_clip_high",
    "learning_rate": "lr",
    "max_completion_length": "max_new_tokens max_tokens max_response_length max_gen_len",
    "max_tokens": "max_new_tokens max_completion_length",  # of chat
    "prompts_per_step": "batch_size train_batch_size rollout_batch_size num_prompts",
    "num_iterations": "ppo_epochs num_ppo_epochs mu",
    "num_train_epochs": "epochs num_epochs",
    "max_grad_norm": "clip_grad grad_clip max_norm",
    "max_steps": "steps num_steps total_steps iterations",
    "lora_r": "lora_rank",
    "model_name_or_path": "model",
    "reward_funcs": "reward rewards reward_fn reward_function",
    "dataset_name": "data dataset",
}


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """Suggest the known name for another trainer's name, or the nearest to a misspelt one."""
    known = list(known)
    near = [ours for ours, names in _ELSEWHERE.items() if ours in known and name.lower() in names.split()]
    near = near or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {shown(near[0])}?" if near else ""
