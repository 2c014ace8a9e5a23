"""Runs checks in a process of its own: python -m fastgrpo.kernel_checks.worker TABLE MODE.

TABLE names a table of cases, as module:attribute. Each line of the input is a JSON object with the name of a case and
a step, "values" or "times"; the answer is a line too. "values" gives the errors with the largest ones that are allowed,
"times" the times and the rate as a share of the device's limit. An exception ends the process; whatever happens to it
is for runner.py to tell.
"""

import gc
import importlib
import json
import os
import sys
import warnings
from typing import Any

import torch

from fastgrpo.kernel_checks.cases import Case
from fastgrpo.kernel_checks.clock import copy_limit, medians, product_limit
from fastgrpo.kernel_checks.places import Place


def find_cases(table: str) -> tuple[Case, ...]:
    """Return a table of cases."""
    module, _, attribute = table.partition(":")
    return getattr(importlib.import_module(module), attribute)


def place_of(case: Case, mode: str, timed: bool) -> Place:
    """Return where a case runs."""
    on_gpu = mode == "gpu"
    return Place(mode, torch.device("cuda" if on_gpu else "cpu"), case.dtype if on_gpu else torch.float32, timed)


def values_of(case: Case, mode: str) -> dict[str, Any]:
    """Compare a kernel with its specification."""
    trial = case.make(place_of(case, mode, timed=False))
    return {"errors": trial.judge(trial.ours())}


def times_of(case: Case, mode: str) -> dict[str, Any]:
    """Time a kernel, and say what share of the device's limit it reaches."""
    place = place_of(case, mode, timed=True)
    trial = case.make(place)
    seconds = {} if trial is None else medians({"ours": trial.ours, "plain": trial.plain}, place.device)
    if "ours" not in seconds:
        return {}
    plain = seconds.get("plain")
    found = {"ms": 1e3 * seconds["ours"], "plain_ms": None if plain is None else 1e3 * plain}
    if mode != "gpu" or not (trial.flops or trial.bytes):
        return found
    limit = product_limit(place.device, place.dtype) if trial.flops else copy_limit(place.device)
    rate = (trial.flops or trial.bytes) / seconds["ours"]
    text = f"{rate / 1e12:.3g} TFLOP/s" if trial.flops else f"{rate / 1e9:.3g} GB/s"
    return {**found, "rate": text, "of_limit": rate / limit}


STEPS = {"values": values_of, "times": times_of}


def main(argv: list[str]) -> None:
    """Run the steps that the input asks for, and print what each found."""
    table, mode = argv
    cases = {case.name: case for case in find_cases(table)}
    if mode == "interpreter":
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy tells of every exp that overflows on its way to a flag
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    for line in sys.stdin:
        asked = json.loads(line)
        torch.manual_seed(0)
        answers.write(json.dumps(STEPS[asked["step"]](cases[asked["name"]], mode)) + "\n")
        answers.flush()
        gc.collect()
        torch.cuda.empty_cache()  # the next one may need all of it


if __name__ == "__main__":
    main(sys.argv[1:])
