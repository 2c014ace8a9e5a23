"""The files that a run reads. None of them may lie in the run's own folder, where it could overwrite or delete them."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastgrpo.config.settings import TrainingConfig

_OURS = Path(__file__).resolve().parent.parent


def inputs_of(
    config: TrainingConfig, functions: Sequence[Callable], model: Any = None, data: Sequence[Any] = ()
) -> dict[str, Path]:
    """Find the files and folders that a run reads."""
    found = {"the model": getattr(model, "name_or_path", model), "the data set": config.dataset_name}
    found["the rows of train_file"] = getattr(config, "train_file", None)  # a setting of supervised training alone
    for number, function in enumerate(functions, 1):
        found[f"the file of reward function {number}"] = _source(function)
        found[f"the model of reward function {number}"] = getattr(function, "name_or_path", None)
    for rows in data:
        rows = getattr(rows, "rows", rows)  # those that a `Rows` holds
        for file in getattr(rows, "cache_files", ()):
            found[f"file {Path(file['filename']).name} of a data set"] = file["filename"]
    return {what: Path(path) for what, path in found.items() if path and Path(path).exists()}


def _source(function):
    """Return the file of a reward function that is not our own, or None where it has none, as in a notebook."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__module__", None) or type(function).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return None if file is None or Path(file).resolve().is_relative_to(_OURS) else file
