"""Settings: what each one may be, the records of all of them, their YAML files, and the command line.

A setting is a field with a docstring: `sections.py` has the fields, and `settings.py` the record of all of them.
`validation.py` holds the rules about several settings at once, `trl.py` TRL's names, `page.py` writes
docs/settings.md, `recipe.py` reads YAML files, and `command.py` is what the commands share.
"""

import sys

try:
    import pydantic  # noqa: F401
except ModuleNotFoundError as error:
    lacking = "the package pydantic is not installed: pip install 'fastgrpo[train]'"
    spec = sys.modules["__main__"].__spec__
    if spec is not None and spec.name.startswith("fastgrpo."):  # a command, which reports a mistake in a line
        print(f"error: {lacking}", file=sys.stderr)
        raise SystemExit(2) from None
    raise ModuleNotFoundError(lacking, name=error.name) from None

from fastgrpo.config.settings import GRPOConfig

__all__ = ["GRPOConfig"]
