"""Which characters of a completion's text come from which token."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HALF = "\ufffd"  # what a decoder writes for a character whose other bytes are in later tokens


class TokenText:
    """Finds where tokens end in the text that they decode to without special tokens.

    The text of most tokens does not depend on their neighbours. So each id is decoded alone, once, and the pieces are
    compared with the whole text. Where they differ (a character of several tokens, a space that a decoder leaves out at
    the beginning), each token is decoded once more with few tokens before it.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer, self.pieces = tokenizer, {}

    def ends(self, ids: Sequence[int]) -> list[int]:
        """Find the end of each token.

        Args:
            ids: [T] token ids.

        Returns:
            [T] the number of characters up to the end of each token, never falling. A token that shows nothing, such as
            a stop token, or one that begins a character which a later token ends, has the end of the one before it. The
            last one has the length of the text.
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

    def counts(self, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Find the tokens at which parts of the text end.

        Args:
            ids: [T] token ids.
            ends: Rising numbers of characters up to the end of each part.
        """
        of_tokens = self.ends(ids)
        length = of_tokens[-1] if of_tokens else 0
        return [len(ids) if end >= length else bisect_left(of_tokens, end) + 1 for end in ends]

    def _decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _piece(self, token):
        """Decode one token, which is done once for each id."""
        piece = self.pieces.get(token)
        if piece is None:
            piece = self.pieces[token] = self._decode([token])
        return piece

    def _with_neighbours(self, ids):
        """Decode each token behind the tokens of the characters before it: what is new in the text is the token's.

        The window begins at `first`, a token that ended a character, and the text of the tokens from there up to `done`
        is known. (vLLM and text-generation-inference write text while it is drawn in this way.)
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
