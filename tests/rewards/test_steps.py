"""Where steps end in a text."""

import pytest

from fastgrpo.rewards.steps import split_steps


@pytest.mark.parametrize(
    "text, steps",
    [
        ("one\n\n two \n\nthree", [("one", 5), ("two", 12), ("three", 17)]),
        ("\n\n\n\none\n\n", [("one", 9)]),
        ("alone", [("alone", 5)]),
        ("", []),
        (" \n\n ", []),
    ],
)
def test_steps_end_after_their_separator(text, steps):
    assert split_steps(text, "\n\n") == steps
    assert all(text[:end].rstrip().endswith(step) for step, end in steps)
