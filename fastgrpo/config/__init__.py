"""Settings, their validation, YAML files and the command line.

A setting is a field with a docstring. `sections.py` defines the fields, `settings.py` the records, `validation.py`
rules about several settings, `trl.py` TRL's names, `recipe.py` YAML files, and `command.py` the shared code of
commands.
"""

import os
import sys
from importlib.util import find_spec

_main = getattr(sys.modules["__main__"], "__spec__", None)  # a debugger has none
_error = None
if find_spec("pydantic") is None:
    _error = "the package pydantic is not installed: pip install 'fastgrpo[train]'"
if _main is not None and _main.name.startswith("fastgrpo."):  # a command: report an error in one line
    try:
        os.getcwd()
    except FileNotFoundError:  # torch would end the process
        _error = "the working directory was deleted; change to another one"
    if _error:
        print(f"error: {_error}", file=sys.stderr)
        raise SystemExit(2)
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print("loading PyTorch ...", file=sys.stderr)  # takes seconds
elif _error:
    raise ModuleNotFoundError(_error, name="pydantic")

from fastgrpo.config.settings import GRPOConfig  # noqa: E402

__all__ = ["GRPOConfig"]
