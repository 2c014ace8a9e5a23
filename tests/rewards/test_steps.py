"""Where steps end, in characters and in tokens (tests/data/test_token_text.py has more on these)."""

import pytest
import tiny

from fastgrpo.rewards.steps import split_steps, token_ends


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


def test_steps_end_with_a_token():
    tokenizer = tiny.tokenizer()
    ids = [*tokenizer("ab\n\ncd")["input_ids"], tokenizer.eos_token_id]
    assert token_ends(tokenizer, ids, [end for _, end in split_steps("ab\n\ncd", "\n\n")]) == [4, 7]
