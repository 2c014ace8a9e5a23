"""Settings, their validation, YAML files and the command line.

A setting is a field with a docstring. `sections.py` defines the fields, `settings.py` the records, `validation.py`
rules about several settings, `trl.py` TRL's names, `page.py` docs/settings.md, `recipe.py` YAML files, and `command.py`
the shared code of commands.
"""

import sys

try:
    import pydantic  # noqa: F401
except ModuleNotFoundError as error:
    lacking = "the package pydantic is not installed: pip install 'fastgrpo[train]'"
    spec = sys.modules["__main__"].__spec__
    if spec is not None and spec.name.startswith("fastgrpo."):  # a command, which reports an error in one line
        print(f"error: {lacking}", file=sys.stderr)
        raise SystemExit(2) from None
    raise ModuleNotFoundError(lacking, name=error.name) from None

from fastgrpo.config.settings import GRPOConfig

__all__ = ["GRPOConfig"]
