"""Tools and environments: what the model may call while it generates a completion, and the dialogues that result.

Names and meaning are TRL's. `find_tools` and `find_environment` look up names from the command line.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastgrpo.rewards import imported

if TYPE_CHECKING:
    from fastgrpo.tools.environments import Environments

__all__ = ["find_environment", "find_environments", "find_tools"]


def find_tools(specs: Sequence[str]) -> list[Callable]:
    """Import the tools module:function."""
    tools = [imported(spec, "tool") for spec in specs]
    for spec, tool in zip(specs, tools, strict=True):
        if not callable(tool):
            raise ValueError(f"tool {spec!r} is a {type(tool).__name__}, which cannot be called")
    return tools


def find_environment(spec: str) -> Callable | Mapping[str, Callable]:
    """Import module:Class, module:function, a dict module:DICT of environments, or its item module:DICT:NAME."""
    path, _, name = spec.rpartition(":")
    if ":" in path:
        found = find_environment(path)
        if not isinstance(found, Mapping) or name not in found:
            raise ValueError(f"environment {spec!r}: {path} is not a dict with the name {name!r}")
        return found[name]
    found = imported(spec, "environment")
    if not callable(found) and not isinstance(found, Mapping):
        raise ValueError(f"environment {spec!r} is a {type(found).__name__}, not a class, a function or a dict of them")
    return found


def find_environments(
    config: Any, tools: Sequence[Callable] = (), environment: Callable | Mapping[str, Callable] | None = None
) -> "Environments | None":
    """Return the tools and environments of the settings; without them, the given ones. None if there are none."""
    from fastgrpo.tools.environments import Environments

    tools = find_tools(config.tools) or list(tools)
    if config.environment is not None:
        environment = find_environment(config.environment)
    return Environments(environment, tools, config.tool_timeout) if tools or environment is not None else None
