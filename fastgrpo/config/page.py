"""docs/settings.md, made from the fields: `python -m fastgrpo.config.page > docs/settings.md`, or `make pages`."""

import dataclasses
import inspect
import re

from fastgrpo.config.distillation import SelectionConfig
from fastgrpo.config.fields import allowed, hints
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.config.supervised import SFTConfig
from fastgrpo.config.validation import CONDITIONS, on_resume

INTRODUCTION = """# Settings

This page is made from the code by `make pages`; a test compares the two.

A setting has the same name in Python (`GRPOConfig(beta=0.04)`), on the command line (`--beta 0.04`) and in a YAML file
(`beta: 0.04`, read by `--config FILE`). On the command line, True and False are written out
(`--gradient_checkpointing False`), and a list is written with spaces (`--reward_weights 1 0.5`). A flag overrides the
file of `--config FILE`, the file overrides the recipe that the task ships in `fastgrpo/recipes/`, and the recipe
overrides the default below. These are the settings of `python -m fastgrpo.train`; the last tables have what
`python -m fastgrpo.sft` and `python -m fastgrpo.distill` have beside them. `--help` shows which of these settings a
command takes.

A setting that is changed where it has no effect is refused. "On resume" says whether a run that continues from a
checkpoint may change the setting:
"""
RESUME = {
    "same": "must stay the same",
    "free": "may change",
    "inexact": "may change, with a warning, because the run then does not continue bit for bit",
}
HEADER = (
    "| flag | default | meaning | allowed | has an effect only where | on resume |\n"
    "|------|---------|---------|---------|-------------------------|-----------|"
)

TITLES = {SFTConfig: "Supervised training", SelectionConfig: "Distillation"}


def page() -> str:
    """Write the page of all settings."""
    rules = "\n".join(f"- *{rule}*: the setting {meaning}." for rule, meaning in RESUME.items())
    return "\n\n".join([INTRODUCTION + "\n" + rules, *map(_table, sections())]) + "\n"


def sections() -> list[type]:
    """Find the sections of `GRPOConfig`, and what supervised training and distillation add to them."""
    return [*(cls for cls in reversed(GRPOConfig.__mro__) if _own(cls)), SFTConfig, SelectionConfig]


def _own(cls):
    """Return the fields that a class adds to those it inherits."""
    added = inspect.get_annotations(cls)
    return [field for field in dataclasses.fields(cls) if field.name in added] if dataclasses.is_dataclass(cls) else []


def _table(section):
    words = (
        TITLES.get(section) or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", section.__name__.removesuffix("Config")).capitalize()
    )
    rows = "\n".join(_row(section, field) for field in _own(section))
    return f"## {words}\n\n{section.__doc__.splitlines()[0]}\n\n{HEADER}\n{rows}"


def _row(section, field):
    meaning, limits = field.metadata["help"], allowed(hints(section)[field.name])
    condition, _ = CONDITIONS.get(field.name, ("", None))
    cells = (f"`--{field.name}`", _value(field.default), meaning, limits, condition, on_resume(field.name))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(default):
    """Show a default as it is written on the command line."""
    if isinstance(default, tuple):
        return " ".join(f"`{item}`" for item in default) or "empty"
    line_break = isinstance(default, str) and "\n" in default
    return f"`${default!r}`" if line_break else f"`{default}`"  # as bash reads a line break


if __name__ == "__main__":
    print(page(), end="")
