"""Runs one check in a process of its own: python -m fastgrpo.check.worker TABLE NAME MODE.

TABLE names a table of cases, as module:attribute. The last line of the output is a JSON object: the errors with the
largest ones that are allowed, the times, and the rate as a share of the device's limit. Whatever else happens to the
process is for runner.py to tell.
"""

import importlib
import json
import sys
import warnings
from typing import Any

import torch

from fastgrpo.check.cases import Case
from fastgrpo.check.clock import copy_limit, medians, product_limit
from fastgrpo.check.places import Place, Trial


def find_cases(table: str) -> tuple[Case, ...]:
    """Return a table of cases.

    Args:
        table: Its module and attribute, as module:attribute.
    """
    module, _, attribute = table.partition(":")
    return getattr(importlib.import_module(module), attribute)


def run_case(case: Case, mode: str) -> dict[str, Any]:
    """Compare a kernel with its specification, and time it where the mode has a size for that.

    Args:
        case: The case.
        mode: A mode of `Place`.

    Returns:
        "errors" with a pair for each name: the error, and the largest one that is allowed. Where it was timed and had
        enough memory for that, "ms" of the kernel and "plain_ms" of plain PyTorch (None where that has not enough); and
        on a GPU, where the case says what bounds it, the "rate" and its share "of_limit".
    """
    device = torch.device("cuda" if mode == "gpu" else "cpu")
    place = Place(mode, device, case.dtype if mode == "gpu" else torch.float32, timed=False)
    trial = case.make(place)
    found = {"errors": trial.judge(trial.ours())}
    del trial
    timed = case.make(place._replace(timed=True))
    return found if timed is None else {**found, **_times(timed, place)}


def _times(trial: Trial, place: Place) -> dict[str, Any]:
    """Time a trial, and say what share of the device's limit it reaches."""
    seconds = medians({"ours": trial.ours, "plain": trial.plain}, place.device)
    if "ours" not in seconds:  # at this size it has not enough memory
        return {}
    plain = seconds.get("plain")
    found = {"ms": 1e3 * seconds["ours"], "plain_ms": None if plain is None else 1e3 * plain}
    if place.mode != "gpu" or not (trial.flops or trial.bytes):
        return found
    limit = product_limit(place.device, place.dtype) if trial.flops else copy_limit(place.device)
    rate = (trial.flops or trial.bytes) / seconds["ours"]
    text = f"{rate / 1e12:.3g} TFLOP/s" if trial.flops else f"{rate / 1e9:.3g} GB/s"
    return {**found, "rate": text, "of_limit": rate / limit}


def main(argv: list[str]) -> None:
    """Run one case of a table, and print what was found.

    Args:
        argv: The table, the case's name and the mode.
    """
    table, name, mode = argv
    (case,) = (case for case in find_cases(table) if case.name == name)
    torch.manual_seed(0)
    if mode == "interpreter":
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy tells of every exp that overflows on its way to a flag
    print("\n" + json.dumps(run_case(case, mode)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
