"""The form of settings: a pydantic dataclass with one docstring under each field, and the types that fields share.

    max_prompts: Annotated[int, Field(ge=1)] | None = None
    \"\"\"Largest number of prompts. None takes all of them.\"\"\"

The records stay dataclasses: `dataclasses.fields`, `replace` and `asdict` work on them, and so do tyro and
transformers' HfArgumentParser, which read a field's type without its `Annotated` and its help from the metadata.
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
    """Turn numbers of NumPy and torch, paths, enums and sets into what Python and YAML have for them."""
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
        raise ValueError(f"{name} must be a dictionary of what JSON can hold, or its text: {error}") from None
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dictionary or its JSON text, got {value!r}")
    return value or {}


def _listed(value):
    """Take a single value for a list of one."""
    value = plain(value)
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else [value]


def _whole(value):
    """Read a whole number that is spelt as 1e3, as which PyYAML gives text."""
    value = float(value) if isinstance(value, str) and re.fullmatch(r"\s*[\d.]+e\+?\d+\s*", value, re.I) else value
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) >= 2**63):
        raise ValueError(f"must be a whole number below 2^63, got {str(value)[:40]}")
    return value


Several = Annotated[list[Item], BeforeValidator(_listed), AfterValidator(tuple)]  # a tuple; also given as one value
Keywords = Annotated[str, BeforeValidator(lambda value: json.dumps(keywords("", value)))]  # JSON text of a dictionary
Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=1)]
Size = Annotated[Whole, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[Whole, Field(ge=0, le=2**32 - 1)]  # NumPy takes no other
Temperature = Annotated[float, Field(ge=1e-30)]  # logits are divided by it; fp32 holds the quotients


def each_of(*choices: str) -> Any:
    """Make the type of a setting that is several of these texts. HfArgumentParser takes no list of Literal."""

    def check(item):
        if item not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {item!r}")
        return item

    return Several[Annotated[str, AfterValidator(check), Literal[choices]]]


CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings_class(record: Record) -> Record:
    """Decorate a class whose fields are settings: a frozen pydantic dataclass that raises one plain error.

    An unknown name is a TypeError that suggests the nearest one. Wrong values are a ValueError with a line for each.
    """
    record = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=CONFIG)(record)
    for field in dataclasses.fields(record):
        if not field.metadata:
            help = record.__pydantic_fields__[field.name].description or ""
            field.metadata = MappingProxyType({"help": " ".join(help.split())})
    checked = record.__init__

    @functools.wraps(checked)
    def __init__(self, *args, **stated):
        kinds = hints(type(self))
        stated = getattr(self, "translated", dict)(stated)
        for name in stated:
            check_name(name, type(self), type(self).__name__, TypeError, getattr(self, "other_names", ()))
        try:
            given = {
                name: _readable(name, value, kinds[name])
                for name, value in stated.items()
                if value is not None or not _is_list(kinds[name])
            }
            checked(self, *args, **given)
        except ValidationError as error:
            raise ValueError(told(error, kinds)) from None

    record.__init__ = __init__
    return record


def _readable(name, value, kind):
    """Make a value plain, and refuse what pydantic would take: a truth value for a number, and NUL in a text."""
    value = plain(value)
    if isinstance(value, bool) and bare(kind) is float:
        raise ValueError(f"{name} must be a number, got {value}")
    if any(isinstance(text, str) and "\0" in text for text in (value if isinstance(value, (list, tuple)) else [value])):
        raise ValueError(f"{name} must be text without NUL characters, got {value!r:.80}")
    return value


def _is_list(kind):
    """Tell whether a setting is a list. None stands for its default, as HfArgumentParser gives it."""
    return get_origin(bare(kind)) is list


# How the types of pydantic's errors begin -> what the value must be.
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text (in quotes)",
    "finite": "finite",
}


def told(error: ValidationError, kinds: Mapping[str, Any], where: str = "") -> str:
    """Put each mistake into a line that names the setting, what it must be, and what it was."""
    lines = []
    for mistake in error.errors(include_url=False):
        type_, name = mistake["type"], str(next(iter(mistake["loc"]), ""))
        if type_ == "value_error":  # of a validator of ours; one of several settings has no place
            lines.append(f"{where}{name} {str(mistake['ctx']['error']).strip()}".strip())
        elif type_ == "missing":
            lines.append(f"{where}{name} must be given")
        else:
            words = _WANTED.get(type_.partition("_")[0]) or allowed(kinds[name]) or mistake["msg"]
            lines.append(f"{where}{name} must be {words}, got {repr(mistake['input'])[:80]}")
    return "\n".join(lines)


@functools.cache
def hints(record: type) -> dict[str, Any]:
    """Return the type of each setting with all that its field says of it."""
    kinds = get_type_hints(record, include_extras=True)
    return {field.name: kinds[field.name] for field in dataclasses.fields(record)}


def convert(name: str, value: Any, kind: Any, where: str = "") -> Any:
    """Convert the value of a setting to its type. `where` stands before the name in an error."""
    held = pydantic.create_model("Held", __config__=ConfigDict(allow_inf_nan=False), **{name: (kind, ...)})
    try:
        return getattr(held.model_validate({name: _readable(f"{where}{name}", value, kind)}), name)
    except ValidationError as error:
        raise ValueError(told(error, {name: kind}, where)) from None


def bare(kind: Any) -> Any:
    """Return a type without None and without what `Annotated` adds."""
    while get_origin(kind) in (Annotated, Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return kind


def allowed(kind: Any) -> str:
    """Say in words which values a type takes, beside None; empty where any of its kind."""
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
        return "one of " + ", ".join(map(str, choices))
    low = next((f"{sign}{bounds[kind]}" for kind, sign in ((Ge, "["), (Gt, "(")) if kind in bounds), None)
    high = next((f"{bounds[kind]}{sign}" for kind, sign in ((Le, "]"), (Lt, ")")) if kind in bounds), None)
    if low and high:
        return f"in {low}, {high}"
    if low:
        return "positive" if low == "(0" else f"above {low[1:]}" if low[0] == "(" else f"at least {low[1:]}"
    return "" if not high else f"below {high[:-1]}" if high[-1] == ")" else f"at most {high[:-1]}"


def own_fields(cls: type) -> list[dataclasses.Field]:
    """Return the fields that a section adds to those it inherits."""
    added = inspect.get_annotations(cls)
    return [field for field in dataclasses.fields(cls) if field.name in added] if dataclasses.is_dataclass(cls) else []


def sections_of(record: type) -> list[type]:
    """Return the sections of a record in the order of its fields."""
    return [cls for cls in reversed(record.__mro__) if own_fields(cls)]


def title(section: type) -> str:
    """Return the words that a section is called."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", section.__name__.removesuffix("Config")).capitalize()


def check_name(name: Any, record: type, where: str, error: type[Exception], others: Iterable[str] = ()) -> None:
    """Refuse a name that is not a setting of a record."""
    if not isinstance(name, str):
        raise error(f"{where}: the name of a setting must be text, got {name!r}")
    names = [field.name for field in dataclasses.fields(record)]
    if name not in names:
        raise error(f"{where}: unknown setting {name!r}{did_you_mean(name, [*names, *others])}")


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """Suggest the known name that is nearest to a misspelt one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {shown(near[0])}?" if near else ""
