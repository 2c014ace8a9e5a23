"""Settings: what each one may be, the records of all of them, their YAML files, and the command line.

A setting is one field: `fields.py` has what a field records, `sections.py`, `training.py` and `objective.py` the fields
themselves, and `settings.py` the record of all of them. `validation.py` holds the rules about several settings at once,
`page.py` writes docs/settings.md, `recipe.py` reads YAML files, and `command.py` is what the commands share.
"""

from fastgrpo.config.settings import GRPOConfig

__all__ = ["GRPOConfig"]
