"""The field of a setting, which holds its default, help, range and condition, and what a resumed run may change.

`setting` makes such a field of a frozen dataclass. Validation, the rules for resumed runs, `--help` and
docs/settings.md are all derived from these fields, so a new setting is declared in one place.
"""

import dataclasses
import difflib
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from fastgrpo.loss.interval import Interval

# The type of a setting that holds keyword arguments, as the JSON text of a dictionary.
Keywords = Annotated[str, "JSON"]
REQUIRED = dataclasses.MISSING  # the default of a setting that must be given
# What a resumed run may do with a setting, and how docs/settings.md says it.
RESUME = {
    "same": "must stay the same",
    "free": "may change",
    "inexact": "may change, with a warning, because the run then does not continue bit for bit",
}


@dataclass(frozen=True)
class When:
    """A condition on other settings, without which a setting would do nothing.

    Attributes:
        text: The condition in words that can follow "has an effect only where".
        holds: Takes the record of all settings, and returns whether the condition holds.
    """

    text: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Setting:
    """All that is known of a setting beyond its name, type and default.

    Attributes:
        help: One or more sentences that a person understands without reading another setting's help.
        choices: The values allowed, or None where they are not enumerated. A tuple may hold only these.
        within: The interval of a number, or of each number of a tuple; None where the setting is not a number.
        active: The condition under which the setting has an effect; None where it always has one.
        resume: What a resumed run may do with it: a key of `RESUME`.
        compared: The condition under which a resumed run looks at it, where stating it is no mistake anywhere. None is
            that of `active`.
    """

    help: str
    choices: tuple | None = None
    within: Interval | None = None
    active: When | None = None
    resume: str = "same"
    compared: When | None = None

    def __post_init__(self):
        assert self.resume in RESUME, self.resume

    @property
    def allowed(self) -> str:
        """The choices or the interval in words; empty where there are neither."""
        if self.choices is not None:
            return "one of " + ", ".join(map(str, self.choices))
        return "" if self.within is None else self.within.text

    @property
    def full_help(self) -> str:
        """The help with the values allowed and the condition, as `--help` shows it."""
        parts = [self.help]
        if self.allowed:
            parts.append(f"It must be {self.allowed}.")
        if self.active is not None:
            parts.append(f"It has an effect only where {self.active.text}.")
        return " ".join(parts)

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that is none of the choices, or a number outside of the interval. None is not a number."""
        for item in value if isinstance(value, tuple) else (value,):
            if self.choices is not None and item not in self.choices:
                raise ValueError(f"{name} must be {self.allowed}, got {item!r}")
            if self.within is not None and item is not None:
                self.within.check(name, item)


def setting(
    default: Any,
    help: str,
    *,
    choices: Iterable | None = None,
    within: Interval | None = None,
    active: When | None = None,
    resume: str = "same",
    compared: When | None = None,
) -> Any:
    """Make the field of a setting."""
    known = Setting(help, None if choices is None else tuple(choices), within, active, resume, compared)
    return dataclasses.field(
        default=default, kw_only=default is REQUIRED, metadata={"help": known.full_help, "setting": known}
    )


def setting_of(field: dataclasses.Field) -> Setting:
    """Return the `Setting` that a field records."""
    return field.metadata["setting"]


def documented(section: type) -> type:
    """Decorate a dataclass of settings: its docstring lists every setting with its help, for `help(GRPOConfig)`."""
    lines = [f"    {field.name}: {setting_of(field).full_help}" for field in dataclasses.fields(section)]
    section.__doc__ = "\n".join([inspect.cleandoc(section.__doc__), "", "Attributes:", *lines])
    return section


def typed(where: str, value: Any, kind: Any) -> Any:
    """Convert a value from a YAML file or from Python to the type of its setting."""
    if get_origin(kind) in (UnionType, Union):  # with None, or with text that stands for a choice to be made later
        kinds = get_args(kind)
        if value is None and type(None) in kinds:
            return None
        return typed(where, value, str if str in kinds and isinstance(value, str) else kinds[0])
    if kind == Keywords:
        return json.dumps(keywords(where, value))
    if hasattr(value, "tolist"):
        value = value.tolist()
    if get_origin(kind) is tuple:
        value = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(typed(where, item, get_args(kind)[0]) for item in items)
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # a whole number that no float can hold
            number = math.inf if value > 0 else -math.inf
        except (TypeError, ValueError):
            raise ValueError(f"{where} must be a number, got {value!r}") from None
        if kind is float:
            return number
        if abs(number) >= 2**63:
            raise ValueError(f"{where} must be a whole number below 2^63, got {number:g}")
        if not number.is_integer():
            raise ValueError(f"{where} must be a whole number, got {value!r}")
        return value if isinstance(value, int) else int(number)
    value = os.fspath(value) if kind is str and isinstance(value, os.PathLike) else value
    if not isinstance(value, kind):
        what = {bool: "true or false", str: "text (in quotes)"}.get(kind, "a number")
        raise ValueError(f"{where} must be {what}, got {value!r}")
    if kind is str and "\0" in value:
        raise ValueError(f"{where} must not have a NUL character in it, got {value!r}")
    return value


def keywords(name: str, value: Any) -> dict[str, Any]:
    """Read keyword arguments: a dictionary, or its JSON text."""
    try:
        value = json.loads(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a dictionary of what JSON can hold, or its text: {error}") from None
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dictionary or its JSON text, got {value!r}")
    return value or {}


def check_fields(record: Any) -> None:
    """Refuse a record with a value that its field does not allow."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value is None and type(None) not in get_args(field.type):
            raise ValueError(f"{field.name} must be given, got None")
        setting_of(field).check(field.name, value)


def check_conditions(record: Any) -> None:
    """Refuse a record with a setting that was changed but has no effect, because ignoring it silently would mislead."""
    for field in dataclasses.fields(record):
        active = setting_of(field).active
        if active is not None and getattr(record, field.name) != field.default and not active.holds(record):
            default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
            raise ValueError(
                f"{field.name} has an effect only where {active.text}; leave it out or, where a recipe sets it, "
                f"pass --{field.name} {default}"
            )


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """Suggest the known name that is nearest to a misspelt one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {shown(near[0])}?" if near else ""
