"""Steps of a completion: where they end in its text, and in its tokens."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

HALF = "\ufffd"  # what a decoder writes for a character whose other bytes are in later tokens


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    """Split a completion into steps. What is empty between two separators is no step.

    Args:
        text: The completion.
        separator: What stands between two steps.

    Returns:
        (the step without the white space around it, the number of characters up to the end of its separator) pairs.
    """
    steps, end = [], 0
    for part in text.split(separator):
        end = min(end + len(part) + len(separator), len(text))
        if part.strip():
            steps.append((part.strip(), end))
    return steps


def token_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Find the tokens at which parts of a completion's text end.

    Args:
        tokenizer: The policy's tokenizer.
        ids: [T] token ids of the completion.
        ends: Rising numbers of characters up to the end of each part, in the text that `ids` decode to without
            special tokens.

    Returns:
        For each part how many tokens there are up to its end, counting the one that holds its last character. At most
        T, which is also the end of the last part where the text ends with it, so that it has the stop token too.
    """
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    found, low = [], 1
    for end in ends:
        if end >= len(whole):
            found.append(len(ids))
            continue
        high = len(ids)
        while low < high:  # the smallest number of tokens whose text reaches the end
            middle = (low + high) // 2
            text = tokenizer.decode(ids[:middle], skip_special_tokens=True)
            if len(text.rstrip(HALF)) >= end:
                high = middle
            else:
                low = middle + 1
        found.append(low)
    return found
