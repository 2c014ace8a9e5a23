"""`GRPOConfig` takes the arguments of `trl.GRPOConfig` as well, and translates them into settings.

trl_names.py lists what becomes of each, and docs/from-trl.md is made from that list.
"""

import enum
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from fastgrpo.config.trl_names import ACCEPTED, INSTEAD, SAME, THEIRS
from fastgrpo.config.trl_translations import BATCH, TRANSLATIONS, VALUES, in_steps

Record = TypeVar("Record", bound=type)


def takes_trl(record: Record) -> Record:
    """Decorate a record of settings: its constructor takes TRL's arguments as well."""
    plain = record.__init__

    @functools.wraps(plain)
    def __init__(self, *args, **stated):
        plain(self, *args, **translated(stated))

    record.__init__ = __init__
    return record


def translated(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Turn arguments of TRL and settings into settings alone."""
    stated = {name: value.value if isinstance(value, enum.Enum) else value for name, value in stated.items()}
    stated |= {name: VALUES[name](stated[name]) for name in VALUES.keys() & stated.keys()}
    for name, value in stated.items():
        if name in INSTEAD:
            _check_refused(name, value)
    settings = {name: value for name, value in stated.items() if name not in THEIRS}
    for names, translate in TRANSLATIONS.items():
        given = [name for name in names if name in stated]
        for name, value in (translate(stated) if given else {}).items():
            if name not in SAME and stated.get(name, value) != value:
                arguments = " and ".join(f"{argument}={stated[argument]!r}" for argument in given)
                verb = "make" if len(given) > 1 else "makes"
                raise ValueError(
                    f"{arguments} {verb} {name}={value!r}, but {name}={stated[name]!r} is given too; leave one of them "
                    "out"
                )
            settings[name] = value
    if any(name in stated for name in BATCH):
        settings = in_steps(settings, settings["updates_per_rollout"] * settings.get("num_iterations", 1))
    return settings


def _check_refused(name, value):
    default, instead = INSTEAD[name]
    same = (default, *ACCEPTED.get(name, ()))
    if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in same):
        raise ValueError(f"{name}={value!r} is TRL's and not for fastgrpo; {instead}")
