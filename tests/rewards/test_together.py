"""Each rank judges its own completions, and all get all of them, as if one rank had judged them all."""

import pytest
import tiny
import torch
from samples import drawn as one_drawn

from fastgrpo.data.prompts import to_prompt
from fastgrpo.ranks import Ranks
from fastgrpo.rewards.call import Rewards, judge_together, reward_matrix

ROWS = [{"prompt": text, "answer": text.upper()} for text in ("ab", "c", "hello")]
ROWS[2]["hint"] = "greet"  # a column of one row alone
PROMPTS = [to_prompt(row, tiny.tokenizer()) for row in ROWS]


def one_of(size, rank, gather):
    """One of several ranks, whose exchanges are played back."""
    ranks = Ranks(rank, size)
    ranks.gather = gather
    return ranks


def drawn(indices, filtered):
    """Two completions of each of these prompts, as a rank draws them."""

    def one(ids):
        sampler = torch.full((len(ids),), -0.5) if filtered else None
        return one_drawn(ids, -torch.arange(1.0, len(ids) + 1), "length", sampler_logps=sampler)

    return {i: [one([70 + i, 71]), one([80 + i, 81, 1])] for i in indices}


def length(completions, completion_ids, log_metric, log_extra, log_steps, answer, hint, **_):
    assert completions and len(hint) == len(completions)  # no call where a rank drew nothing
    log_metric("seen", len(completions))
    log_extra("letters", [len(text) for text in completions])
    log_steps([[1, len(ids)] for ids in completion_ids], [[ids[0], ids[-1]] for ids in completion_ids])
    return [len(text) / 4 + len(a) for text, a in zip(completions, answer, strict=True)]


def failing(completions, **_):
    return [None if "G" in text else 1.0 for text in completions]


def together(shares, filtered=False, functions=(length, failing), on_error="raise", **arguments):
    """What each rank gets, where rank r drew the prompts of shares[r]."""

    def judge(ranks, share, **more):
        rewards = Rewards(list(functions), on_error=on_error)
        return judge_together(rewards, drawn(share, filtered), PROMPTS, tiny.tokenizer(), ranks=ranks, **more)

    given, size = [], len(shares)
    for rank, share in enumerate(shares):
        judge(one_of(size, rank, lambda value, what: given.append(value) or [value]), share)
    ranks = [one_of(size, rank, lambda value, what: given) for rank in range(size)]
    return [judge(one, share, **arguments) for one, share in zip(ranks, shares, strict=True)]


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("shares", [[[0, 2], [1]], [[2], [0, 1]], [[0, 1, 2], []], [[], [0, 1, 2]]])
def test_all_ranks_get_the_rewards_of_one_process(shares, filtered):
    alone = judge_together(Rewards([length, failing]), drawn(range(3), filtered), PROMPTS, tiny.tokenizer())
    for judged in together(shares, filtered):
        assert [c.prompt for c in judged.completions] == [c.prompt for c in alone.completions]
        for mine, theirs in zip(judged.completions, alone.completions, strict=True):
            assert mine.ids == theirs.ids and mine.content == theirs.content
            assert torch.equal(mine.logps, theirs.logps)
            assert mine.finish_reason == theirs.finish_reason and mine.extras == theirs.extras
            assert mine.steps == theirs.steps
            assert mine.steps["length"] == ((1, mine.ids[0]), (len(mine.ids), mine.ids[-1]))
            assert torch.equal(mine.sampler_logps, mine.logps) is not filtered
            assert torch.equal(mine.sampler_logps, theirs.sampler_logps)
        assert reward_matrix(judged.completions).nan_to_num(-1).equal(reward_matrix(alone.completions).nan_to_num(-1))
        assert judged.errors == alone.errors and sum(judged.logged["seen"]) == sum(alone.logged["seen"]) == 6


def test_errors_of_all_ranks_are_counted():
    def broken(completions, **_):
        raise ValueError("broken")

    for judged in together([[0, 2], [1]], functions=(length, broken), on_error="skip"):
        assert judged.errors == {"broken": 6}
