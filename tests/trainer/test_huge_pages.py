"""Trainers ask torch for huge pages; the loss alone sets nothing for the program that imports it."""

import os
import subprocess
import sys

import pytest

NAME = "THP_MEM_ALLOC_ENABLE"


@pytest.mark.parametrize(
    ("code", "given", "expected"),
    [
        ("import fastgrpo; fastgrpo.GRPOTrainer", None, "1"),
        ("import fastgrpo; fastgrpo.GRPOTrainer", "0", "0"),
        ("import fastgrpo; fastgrpo.linear_grpo_loss", None, "None"),
    ],
)
def test_who_asks_for_huge_pages(code, given, expected):
    environment = {name: value for name, value in os.environ.items() if name != NAME}
    environment |= {} if given is None else {NAME: given}
    printed = f"{code}; import os; print(os.environ.get({NAME!r}))"
    done = subprocess.run([sys.executable, "-c", printed], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]
