"""The processes of a run, one for each GPU, as torchrun starts them. Each is a rank and knows how many there are.

All ranks take the same decisions, because all of them know the whole: each takes the same rows, and each gets the
completions that all of them drew. Only what costs time is dealt out: drawing, judging, forward and backward passes.
"""

from fastgrpo.ranks.group import ALONE, RankLost, Ranks, outlive_sigterm
from fastgrpo.ranks.join import join, launched, refuse_ranks

__all__ = ["ALONE", "RankLost", "Ranks", "join", "launched", "outlive_sigterm", "refuse_ranks"]
