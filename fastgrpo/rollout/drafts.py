"""Drafts: guesses of the next tokens of a completion, looked up in what its group has written so far.

A guess is what followed the last tokens of a completion where they stood before: in the prompt, in the completion
itself, or in another completion of the same prompt (prompt lookup decoding). No second model is needed.

Whether a draft pays is decided by counts, never by a clock, so that a run can be repeated. `Odds` holds for each kind
of guess how often it was right. Every token that is drawn is guessed first, drafted or not, so that the counts grow
without a pass of their own. `worth_verifying` weighs the chances of drafts against what a pass over more tokens costs.

Shapes: n lanes in use, k most drafted tokens of a lane.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

PROMPT_LOOKUP_MAX = 4  # tokens of the longest context that is looked up; vLLM's name and meaning
# What the odds of a kind of guess start from: so many guesses, of which so many were right.
PRIOR_GUESSES, PRIOR_RIGHT = 8, 1
# What `pass_time` is made of. It follows from how fast packed weights are multiplied (packed.py): SmolLM2-135M in fp32
# takes this time on a CPU, other models a similar one. The attention of a draft reads the keys of its lane anew.
PASS, ROW, DRAFT = 0.75, 0.042, 0.022
MARGIN = 1.12  # what a pass must promise to be better by, since chances and times are estimates

Kind = tuple[int, int, bool]


class Guess(NamedTuple):
    """A guess of one token.

    Attributes:
        token: The token.
        kind: What its odds depend on: the tokens of the context that was found, how often the guessed token stood after
            it (3 stands for more, too), and whether nothing else ever did.
    """

    token: int
    kind: Kind


class Odds:
    """How often each kind of guess was right."""

    def __init__(self) -> None:
        self.guesses, self.right = Counter(), Counter()

    def note(self, guess: Guess, token: int) -> None:
        """Count a guess."""
        self.guesses[guess.kind] += 1
        self.right[guess.kind] += guess.token == token

    def of(self, kind: Kind) -> float:
        """Estimate the probability that a guess is right."""
        return (self.right[kind] + PRIOR_RIGHT) / (self.guesses[kind] + PRIOR_GUESSES)


class Followers:
    """Which tokens followed each context of 1 to `PROMPT_LOOKUP_MAX` tokens in the texts of a group."""

    def __init__(self) -> None:
        self.counts = {}  # context -> {token: count}, the latest token last

    def add(self, text: Sequence[int], start: int) -> None:
        """Read on in a text."""
        for at in range(start, len(text)):
            for length in range(1, min(PROMPT_LOOKUP_MAX, at) + 1):
                counts = self.counts.setdefault(tuple(text[at - length : at]), {})
                counts[text[at]] = counts.pop(text[at], 0) + 1

    def guess(self, text: Sequence[int]) -> Guess | None:
        """Guess the next token: the most frequent one after the longest context that was seen, the latest of several."""
        for length in range(min(PROMPT_LOOKUP_MAX, len(text)), 0, -1):
            counts = self.counts.get(tuple(text[-length:]))
            if counts:
                token = max(reversed(counts), key=counts.get)
                return Guess(token, (length, min(counts[token], 3), len(counts) == 1))
        return None


def pass_time(lanes: int, drafted: int) -> float:
    """Return the time of a forward pass, as a share of that of a decode step of one lane."""
    return max(1.0, PASS + ROW * (lanes + drafted)) + DRAFT * drafted


def worth_verifying(chances: Sequence[Sequence[float]]) -> list[int]:
    """Choose how many drafted tokens of each lane go into the next pass, so that it yields the most tokens a second.

    A pass over n lanes and j drafted tokens yields n tokens, and each drafted one by its chance. Those with the best
    chances are taken, as many as make (n + chances) / pass_time(n, j) the largest.

    Returns:
        [n] tokens to verify. All are 0 where a decode step is better.
    """
    n, taken = len(chances), [0] * len(chances)
    best, tokens, count = MARGIN * n / pass_time(n, 0), float(n), 0
    ordered = sorted((-chance, lane) for lane, of_lane in enumerate(chances) for chance in of_lane)
    for j, (negated, _) in enumerate(ordered, 1):
        tokens -= negated
        if tokens / pass_time(n, j) > best:
            best, count = tokens / pass_time(n, j), j
    for _, lane in ordered[:count]:
        taken[lane] += 1
    return taken
