"""Packing: which state predicts which token. Micro-batches: the token budget. Dealing: shares of the ranks."""

import math
import random
from dataclasses import replace
from itertools import count, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.micro_batches import Dealer, micro_batches
from fastgrpo.ranks import Ranks

PER_TOKEN = {"weights": "weights", "old_logps": "old_logps", "ref_logps": "ref_logps", "logps": "rollout_logps",
             "sampler_logps": "sampler_logps", "entropy_weights": "entropy_weights"}  # fmt: skip


@st.composite
def groups(draw, most=8):
    """Groups in any lengths. The prompt of group i is made of i, and no completion token occurs twice."""
    tokens, made = count(100), []
    for i in range(draw(st.integers(1, 6))):
        prompt, lengths = [i] * draw(st.integers(1, 6)), draw(st.lists(st.integers(1, most), min_size=1, max_size=5))
        made.append([Sample(prompt, list(islice(tokens, n)), i - 2.0) for n in lengths])
    return made


def flat(groups):
    return [sample for group in groups for sample in group]


def tokens_seen(batch):
    """The tokens that each packed token attends to, itself last, by the layout that PackedAttention reads."""
    sequences = [part.tolist() for part in batch.input_ids.split(batch.lengths)]
    prompts = sequences[: len(batch.branches)]
    before = [[] for _ in prompts] + [p for p, own in zip(prompts, batch.branches, strict=True) for _ in own]
    assert batch.lengths[len(prompts) : len(before)] == [length for own in batch.branches for length in own]
    before += [[] for _ in sequences[len(before) :]]
    return [start + own[: i + 1] for start, own in zip(before, sequences, strict=True) for i in range(len(own))]


@given(groups(), st.booleans(), st.randoms(use_true_random=False))
def test_each_drawn_token_is_predicted_by_the_state_of_its_prefix(groups, share_prompt, random):
    samples = flat(groups)
    masks = [[1, *(random.randint(0, 1) for _ in sample.ids[1:])] for sample in samples]
    samples = [replace(s, tool_mask=None if all(mask) else mask) for s, mask in zip(samples, masks, strict=True)]
    batch = Batch.pack(samples, "cpu", share_prompt)
    seen = tokens_seen(batch)
    assert batch.position_ids.tolist() == [len(tokens) - 1 for tokens in seen]
    pairs = list(zip(samples, masks, strict=True))
    expected = [s.prompt_ids + s.ids[:t] for s, mask in pairs for t in range(len(mask)) if mask[t]]
    assert [seen[row] for row in batch.rows.tolist()] == expected
    drawn = [[t for t, own in zip(s.ids, mask, strict=True) if own] for s, mask in zip(samples, masks, strict=True)]
    assert [values.tolist() for values in batch.targets.tensor_split(batch.cu_seqlens[1:-1])] == drawn
    prompts = sum(len(group[0].prompt_ids) * (1 if share_prompt else len(group)) for group in groups)
    assert len(batch.input_ids) == prompts + sum(len(sample.ids) - 1 for sample in samples)  # the least there can be


@given(groups(), st.booleans(), st.booleans())
def test_values_of_tokens_keep_the_order_of_the_samples(groups, by_token, some_counted):
    samples = []
    for number, sample in enumerate(flat(groups)):
        ids = torch.tensor(sample.ids)
        values = {name: ids + 1000.0 * i for i, name in enumerate(PER_TOKEN)}
        values |= {"token_advantages": ids / 8} if by_token else {}
        values |= {"counted": torch.full(ids.shape, number % 2.0)} if some_counted else {}
        samples.append(replace(sample, **values))
    batch, ids = Batch.pack(samples, "cpu"), torch.tensor([token for sample in samples for token in sample.ids])
    for i, name in enumerate(PER_TOKEN.values()):
        assert torch.equal(getattr(batch, name), ids + 1000.0 * i), name
    advantages, lengths = torch.tensor([s.advantage for s in samples]), torch.tensor([len(s.ids) for s in samples])
    expected = ids / 8 if by_token else advantages.repeat_interleave(lengths) if some_counted else advantages
    if some_counted:
        expected = expected * (torch.arange(len(samples)) % 2).repeat_interleave(lengths)
    assert torch.equal(batch.advantages, expected)


def inputs(samples, share_prompt=True):
    return len(Batch.pack(samples, "cpu", share_prompt).input_ids)


@given(groups(most=20), st.integers(1, 60), st.booleans())
def test_micro_batches_keep_the_budget_and_rarely_split_groups(groups, budget, share_prompt):
    samples = flat(groups)
    parts = micro_batches(samples, budget, share_prompt)
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    assert parts == sorted(map(sorted, parts))
    for part in parts:  # a sample that exceeds the budget by itself stands alone
        assert len(part) == 1 or inputs([samples[i] for i in part], share_prompt) <= budget
    total = inputs(samples, share_prompt)
    assert (len(parts) == 1) == (total <= budget or len(samples) == 1)
    for group in groups if share_prompt else ():
        places = {tuple(part) for part in parts for i in part if samples[i].prompt_ids == group[0].prompt_ids}
        assert len(places) == 1 or inputs(group) > budget or len(parts) > math.ceil(total / budget)


def test_one_micro_batch_more_than_the_least_is_enough_for_lengths_like_gsm8ks():
    rng, samples = random.Random(0), []
    for i in range(32):
        prompt = [i] * rng.randint(50, 250)
        lengths = [min(1024, max(1, round(rng.lognormvariate(math.log(200), 0.6)))) for _ in range(8)]
        samples += [Sample(prompt, [i] * n, 0.0) for n in lengths]
    parts = micro_batches(samples, 8192)
    assert len(parts) <= math.ceil(inputs(samples) / 8192) + 1
    assert sum(len({i // 8 for i in part}) for part in parts) - 32 <= 0.05 * 32  # groups that are split


def dealers(size, lockstep=False, share_prompt=True):
    return [Dealer(50, share_prompt, Ranks(rank, size), lockstep) for rank in range(size)]


@given(groups(most=20), st.integers(1, 8))
def test_ranks_agree_on_balanced_shares(groups, size):
    samples = flat(groups)
    shares = [dealer.shares(samples) for dealer in dealers(size)]
    assert all(share == shares[0] for share in shares)
    assert sorted(i for share in shares[0] for i in share) == list(range(len(samples)))
    assert all(share == sorted(share) for share in shares[0])
    total, largest = sum(map(len, samples)), max(sum(map(len, group)) for group in groups)
    assert max(sum(len(samples[i]) for i in share) for share in shares[0]) <= total / size + largest
    for group in groups:
        holders = [share for share in shares[0] if any(samples[i].prompt_ids == group[0].prompt_ids for i in share)]
        assert len(holders) == 1 or sum(map(len, group)) > total / size


@given(groups(most=60), st.integers(1, 4), st.booleans())
def test_ranks_in_lockstep_make_equally_many_passes(groups, size, lockstep):
    samples = flat(groups)
    passes = [dealer.passes(samples, dealer.shares(samples)) for dealer in dealers(size, lockstep)]
    assert sorted(i for of_rank in passes for part in of_rank for i in part) == list(range(len(samples)))
    assert not lockstep or len({len(of_rank) for of_rank in passes}) == 1
    assert lockstep or all(part for of_rank in passes for part in of_rank)


def test_splits_groups_larger_than_a_share():
    samples = [Sample([1] * 3, [5] * 40, 1.0) for _ in range(8)]
    assert sorted(map(len, dealers(4)[0].shares(samples))) == [2, 2, 2, 2]


def test_makes_no_passes_without_samples():
    assert micro_batches([], 10) == []
    assert dealers(2)[0].shares([]) == [[], []]
    assert dealers(2, lockstep=True)[1].passes([], [[], []]) == []


@pytest.mark.gpu
def test_packing_causes_no_sync():
    samples = [Sample([1] * 20000, [2] * 20000, 0.5, weights=torch.ones(20000)) for _ in range(2)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = Batch.pack(samples, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(batch.input_ids.cpu(), Batch.pack(samples, "cpu").input_ids)
