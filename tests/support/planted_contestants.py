"""Contestants that patch, raise, die and cannot be made, for the tests of benchmarks/contestants.py."""

import os

import torch

from benchmarks.contestants import Entry


def entry(variant):
    """The entry of one contestant, with one variant of its name."""
    if variant == "cannot be made":
        raise ImportError("no package")
    if variant == "patches":
        torch.sum = lambda ones: torch.tensor(-1.0)

    calls = 0

    def call():
        nonlocal calls
        calls += 1
        if variant.endswith("second round") and calls == 3:  # the first call is the warm-up
            raise OSError("no memory")
        if variant.endswith("raises"):
            raise OSError("no memory")
        if variant == "dies":
            os._exit(3)
        return {"sum": torch.sum(torch.ones(10)).item()}

    return Entry({variant: call}, about={"name": variant, "self-check": os.environ.get("FASTGRPO_SELF_CHECK")})
