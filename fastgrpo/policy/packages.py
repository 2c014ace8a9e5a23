"""Packages that the engine can do without: whether one can be used here, and the command that installs it."""

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from fastgrpo.config.command import pip_line

logger = logging.getLogger(__name__)


@cache
def package_obstacle(module: str) -> str | None:
    """Say why a package cannot be used, as a predicate of what needs it. A package that is there is imported.

    A compiled package that was built for another version of torch is installed, but fails when it is imported. That is
    also logged, once, for whoever goes on without the package.
    """
    root = module.partition(".")[0]
    if find_spec(root) is None:
        return f"needs the package: {pip_line(root)}"
    try:
        import_module(module)
    except (ImportError, OSError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        obstacle = f"{root} is installed but does not load ({reason}); remove it, then {pip_line(root)}"
        logger.warning("%s", obstacle)
        return f"needs a package that loads: {obstacle}"
    return None
