"""The ends of the steps of a completion, in its text and in its tokens."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from fastgrpo.data.token_text import TokenText


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    """Split a completion into steps. Empty steps are dropped.

    Args:
        text: The completion.
        separator: Separates two steps.

    Returns:
        Pairs (step without surrounding white space, number of characters up to the end of its separator).
    """
    steps, end = [], 0
    for part in text.split(separator):
        end = min(end + len(part) + len(separator), len(text))
        if part.strip():
            steps.append((part.strip(), end))
    return steps


def token_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Find the tokens at which steps of a completion end, as `log_steps` takes them.

    Args:
        tokenizer: The policy's tokenizer.
        ids: [T] token ids of the completion.
        ends: Rising numbers of characters up to the end of each step, in the text that `ids` decode to without special
            tokens.

    Returns:
        The number of tokens up to the end of each step, see `TokenText.counts`.
    """
    return TokenText(tokenizer).counts(ids, ends)
