"""Environments in which chosen distributions are installed, with what they require, and nothing else.

They are links to what is installed here, so that they cost neither a download nor a copy.
"""

import importlib.metadata
import re
import venv
from pathlib import Path

from packaging.requirements import Requirement


def named(name):
    """The name of a distribution in its normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(*requirements):
    """The installed distributions that requirements lead to, by their names."""
    found, waiting, seen = {}, [Requirement(text) for text in requirements], set()
    while waiting:
        requirement = waiting.pop()
        key = named(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = distribution = importlib.metadata.distribution(requirement.name)
        extras = {"", *requirement.extras}
        for further in map(Requirement, distribution.requires or ()):
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(further)
    return found


def requirements_of(metadata, *extras):
    """The requirements in the METADATA of a wheel that is not installed: its own, and those of extras."""
    every = map(Requirement, importlib.metadata.PathDistribution(Path(metadata).parent).requires)
    wanted = [r for r in every if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in ("", *extras))]
    return [f"{r.name}[{','.join(r.extras)}]{r.specifier}" for r in wanted]


def make(folder, *requirements):
    """A virtual environment with the closure of some requirements. Returns its Python, and the names in it."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    distributions = closure(*requirements)
    for distribution in distributions.values():
        tops = {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            link = packages / top
            if top.endswith(".pth") or link.is_symlink():  # a .pth file could lead to everything else
                continue
            link.symlink_to(Path(distribution.locate_file(top)))
    return folder / "bin" / "python", set(distributions)
