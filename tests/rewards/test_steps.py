"""Where steps end, in characters and in tokens."""

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


def test_ends_in_tokens_of_one_byte():
    tokenizer = tiny.tokenizer()
    ids = [*tokenizer("ab\n\ncd")["input_ids"], tokenizer.eos_token_id]
    assert token_ends(tokenizer, ids, [4, 6]) == [4, 7]  # the stop token belongs to the last part
    assert token_ends(tokenizer, ids, [1, 5]) == [1, 5]
    assert token_ends(tokenizer, ids, []) == []


def test_a_character_of_several_tokens_ends_with_its_last_one():
    tokenizer = tiny.tokenizer()
    text = "é。ö"  # 2, 3 and 2 bytes, a token each
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 7 and token_ends(tokenizer, ids, [1, 2, 3]) == [2, 5, 7]
    cut = [*tokenizer("a。")["input_ids"][:-1], *tokenizer("bc")["input_ids"]]  # bytes that are no character
    whole = tokenizer.decode(cut)
    assert token_ends(tokenizer, cut, [1, whole.index("b") + 1, len(whole)]) == [1, 4, 5]


def test_special_tokens_within_a_completion_have_no_characters():
    tokenizer = tiny.tokenizer()
    ids = [*tokenizer("ab")["input_ids"], tokenizer.pad_token_id, *tokenizer("cd")["input_ids"]]
    assert token_ends(tokenizer, ids, [2, 3, 4]) == [2, 4, 5]
