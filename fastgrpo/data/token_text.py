"""Maps the tokens of a completion to the characters of its text."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HALF = "\ufffd"  # decoders write it for an incomplete character


class TokenText:
    """Finds the end of each token in the decoded text, without special tokens.

    The text of most tokens does not depend on their neighbours. So each id is decoded separately, once, and the pieces
    are compared with the whole text. If they differ (a character of several tokens, a dropped leading space), each
    token is decoded again after a few preceding tokens.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer, self.pieces = tokenizer, {}

    def ends(self, ids: Sequence[int]) -> list[int]:
        """Find the end of each token, the number of characters up to it, non-decreasing.

        A token without text, such as a stop token or the first bytes of a character, has the end of the token before
        it. The last token has the length of the text.
        """
        if not len(ids):
            return []
        whole = self._decode(ids)
        ends = list(accumulate(len(self._piece(token)) for token in ids))
        if "".join(map(self._piece, ids)) != whole:
            ends = self._with_neighbours(ids)
        ends = [min(end, len(whole)) for end in ends]
        ends[-1] = len(whole)
        return ends

    def turns(self, ids: Sequence[int], mask: Sequence[int]) -> list[str]:
        """Cut the text of a completion with tools: a drawn turn, what followed it, the next drawn turn, and so on."""
        ends = [0, *self.ends(ids)]
        cuts = [ends[i] for i, (before, now) in enumerate(pairwise([1, *mask])) if before != now]
        whole = self._decode(ids)
        return [whole[start:end] for start, end in pairwise([0, *cuts, len(whole)])]

    def counts(self, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Return the number of tokens up to the end of each part of the text; `ends` counts characters, increasing."""
        of_tokens = self.ends(ids)
        length = of_tokens[-1] if of_tokens else 0
        return [len(ids) if end >= length else bisect_left(of_tokens, end) + 1 for end in ends]

    def _decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _piece(self, token):
        """Decode one token, with a cache."""
        piece = self.pieces.get(token)
        if piece is None:
            piece = self.pieces[token] = self._decode([token])
        return piece

    def _with_neighbours(self, ids):
        """Decode each token after a few preceding ones: the new text is the token's.

        The window begins at `first`, after a complete character. The text of the tokens from `first` to `done` is
        known. (vLLM and text-generation-inference detokenize a stream in this way.)
        """
        ends, end, first, done = [], 0, 0, 0
        for i in range(len(ids)):
            known, text = self._decode(ids[first:done]), self._decode(ids[first : i + 1])
            # A token may end one character and begin the next one, such as a space and the first bytes of an emoji.
            ends.append(max(end + len(text.rstrip(HALF)) - len(known), ends[-1] if ends else 0))
            if len(text) > len(known) and not text.endswith(HALF):
                end += len(text) - len(known)
                first, done = done, i + 1
        return ends
