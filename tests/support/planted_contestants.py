"""Contestants that patch, raise, die and cannot be made, for the tests of benchmarks/contestants.py."""

import itertools
import os

import torch

from benchmarks.contestants import Entry


def entry(variant):
    if variant == "cannot be made":
        raise ImportError("no package")
    if variant == "patches":
        torch.sum = lambda ones: torch.tensor(-1.0)
    calls = itertools.count()

    def call():
        if variant.endswith("raises") or (variant.endswith("second round") and next(calls) == 2):  # 0 is the warm-up
            raise OSError("no memory")
        if variant == "dies":
            os._exit(3)
        return {"sum": torch.sum(torch.ones(10)).item()}

    return Entry({variant: call}, about={"name": variant, "self-check": os.environ.get("FASTGRPO_SELF_CHECK")})
