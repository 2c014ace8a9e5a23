"""Every rank deals samples to all ranks in the same way: each sample to one rank, balanced, groups together."""

import random

import pytest

from fastgrpo.data.records import Sample
from fastgrpo.policy.micro_batches import Dealer
from fastgrpo.ranks import Ranks


def groups_of(sizes, seed=0):
    """Samples of groups with so many tokens a completion; the prompt of group i is [i] * 3."""
    return [Sample([i] * 3, [5] * length, 1.0) for i, group in enumerate(sizes) for length in group]


def dealers(size, lockstep=False, max_tokens=50):
    return [Dealer(max_tokens, True, Ranks(rank, size), lockstep) for rank in range(size)]


def ragged(seed, groups=12):
    rng = random.Random(seed)
    return groups_of([[rng.randint(1, 40) for _ in range(rng.randint(1, 6))] for _ in range(groups)])


def test_one_rank_gets_all_samples_in_their_order():
    samples = ragged(0)
    assert Dealer(50).shares(samples) == [list(range(len(samples)))]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_each_sample_goes_to_one_rank_and_all_ranks_agree(size, seed):
    samples = ragged(seed)
    shares = [dealer.shares(samples) for dealer in dealers(size)]
    assert all(share == shares[0] for share in shares)
    assert sorted(i for share in shares[0] for i in share) == list(range(len(samples)))
    assert all(share == sorted(share) for share in shares[0])


def test_tokens_are_balanced_and_the_samples_of_a_prompt_stay_together():
    samples = groups_of([[20] * 4] * 8)
    for share in Dealer(50, True, Ranks(0, 4)).shares(samples):
        assert len(share) == 8 and len({samples[i].prompt_ids[0] for i in share}) == 2


def test_a_group_that_is_more_than_a_share_is_split():
    samples = groups_of([[40] * 8, [1]])
    loads = [sum(len(samples[i]) for i in share) for share in Dealer(50, True, Ranks(0, 4)).shares(samples)]
    assert max(loads) <= 2 * 43 + 4


def test_a_rank_without_samples_has_an_empty_share():
    samples = groups_of([[3], [4]])
    assert sorted(map(len, Dealer(50, True, Ranks(0, 4)).shares(samples))) == [0, 0, 1, 1]
    assert Dealer(50, True, Ranks(0, 4)).shares([]) == [[], [], [], []]


def test_in_lockstep_all_ranks_make_equally_many_passes():
    samples = groups_of([[300], *[[45]] * 5])  # one rank makes one pass, the other one five
    for lockstep in (False, True):
        passes = [dealer.passes(samples, dealer.shares(samples)) for dealer in dealers(2, lockstep)]
        made = [[part for part in of_rank if part] for of_rank in passes]
        assert sorted(i for of_rank in made for part in of_rank for i in part) == list(range(6))
        assert (len(passes[0]) == len(passes[1])) is lockstep
    assert Dealer(50, True, Ranks(1, 2), True).passes([], [[], []]) == []
