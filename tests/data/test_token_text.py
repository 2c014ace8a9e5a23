"""The ends of tokens in their text, for every kind of tokenizer, against decoding every prefix."""

import hypothesis
import pytest
import tiny
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastgrpo.data.token_text import HALF, TokenText

TEXT = "Ünïcode: 日本語 🙂🙂 and\n\n  two  spaces, naïve café — 1+1=2."


def test_turns_of_a_completion_with_tools_are_cut_at_their_tokens():
    tokenizer = tiny.tokenizer()
    parts = ["ab 🙂", "[4]", "c", ""]
    of_parts = [tokenizer(part)["input_ids"] for part in parts]
    ids = [token for part in of_parts for token in part]
    mask = [1 - i % 2 for i, part in enumerate(of_parts) for _ in part]
    assert TokenText(tokenizer).turns(ids, mask) == parts[:3]
    assert TokenText(tokenizer).turns(ids, [1 - own for own in mask]) == ["", *parts[:3]]


def of_words():
    """SentencePiece's form: a space is a part of the token behind it, and none is written at the beginning."""
    pieces = ["▁", *sorted({c for c in TEXT if not c.isspace()}), "▁and", "▁two", "an", "▁sp", "aces", "▁caf", "é"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(["<unk>", "<eos>", *pieces, "\n"]))}
    core = Tokenizer(models.BPE(vocabulary, [("a", "n")], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")


def slow_ends(tokenizer, ids):
    """The text of every beginning, without the bytes that are no character yet."""
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    texts = [tokenizer.decode(ids[: i + 1], skip_special_tokens=True) for i in range(len(ids))]
    return [len(text.rstrip(HALF)) for text in texts[:-1]] + [len(whole)]


@pytest.mark.parametrize("make", [tiny.tokenizer, of_words])
def test_every_token_ends_where_the_text_of_the_tokens_up_to_it_does(make):
    tokenizer = make()
    ids = tokenizer(TEXT)["input_ids"]
    ids = [*ids[:7], tokenizer.eos_token_id, *ids[7:], tokenizer.eos_token_id]
    assert TokenText(tokenizer).ends(ids) == slow_ends(tokenizer, ids)
    assert TokenText(tokenizer).ends([]) == []


TOKENIZERS = [(tokenizer, TokenText(tokenizer)) for tokenizer in (tiny.tokenizer(), of_words())]


@hypothesis.given(st.sampled_from(TOKENIZERS), st.lists(st.integers(0, 2**16), min_size=1, max_size=40))
def test_tokens_in_any_order_rise_to_the_whole_text(made, draws):
    """A policy may draw any tokens, also bytes that do not form a character."""
    tokenizer, reader = made
    ids = [draw % len(tokenizer) for draw in draws]
    ends = reader.ends(ids)
    assert ends == sorted(ends) and ends[-1] == len(tokenizer.decode(ids, skip_special_tokens=True))


def test_parts_end_at_token_boundaries():
    tokenizer = tiny.tokenizer()

    def ids(text):
        return tokenizer(text)["input_ids"]

    cut = [*ids("a。")[:-1], *ids("bc")]  # bytes that are no character
    whole = tokenizer.decode(cut)
    for given, ends, tokens in (
        ([*ids("ab\n\ncd"), tokenizer.eos_token_id], [4, 6], [4, 7]),  # the stop token belongs to the last part
        ([*ids("ab\n\ncd"), tokenizer.eos_token_id], [1, 5], [1, 5]),
        (ids("ab"), [], []),
        (ids("é。ö"), [1, 2, 3], [2, 5, 7]),  # 2, 3 and 2 bytes, a token each
        (cut, [1, whole.index("b") + 1, len(whole)], [1, 4, 5]),
        ([*ids("ab"), tokenizer.pad_token_id, *ids("cd")], [2, 3, 4], [2, 4, 5]),  # special tokens have no characters
    ):
        assert TokenText(tokenizer).counts(given, ends) == tokens


def test_a_token_that_ends_one_character_and_begins_the_next_ends_behind_the_first():
    # Token 2 is a space and the first half of an emoji.
    core = Tokenizer(models.BPE({"<eos>": 0, "a": 1, "ĠðŁ": 2, "ĻĤ": 3, "b": 4}, []))
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    ids = [1, 2, 3, 4, 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a 🙂b"
    assert TokenText(tokenizer).ends(ids) == slow_ends(tokenizer, ids) == [1, 2, 3, 4, 4]
