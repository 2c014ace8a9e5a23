"""Micro-batches: the token budget, groups that stay whole, and how full micro-batches are."""

import math
import random

import pytest

from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.micro_batches import micro_batches


def inputs(samples, indices, share_prompt=True):
    return len(Batch.pack([samples[i] for i in indices], "cpu", share_prompt).input_ids)


def tokens_by_prompt(samples, indices):
    """The inputs of each prompt's samples, the prompt counted once."""
    tokens = {}
    for sample in (samples[i] for i in indices):
        tokens.setdefault(sample.prompt_ids[0], len(sample.prompt_ids))
        tokens[sample.prompt_ids[0]] += len(sample.ids) - 1
    return tokens


def group(prompt, *completions, prompt_tokens=10):
    return [Sample([prompt] * prompt_tokens, [prompt] * n, 0.0) for n in completions]


def gsm8k_like(seed, groups, size=8):
    """Groups with prompts of 50 to 250 tokens, and completions log-normal around 200 up to 1,024."""
    rng = random.Random(seed)
    samples = []
    for number in range(groups):
        lengths = [min(1024, max(1, round(rng.lognormvariate(math.log(200), 0.6)))) for _ in range(size)]
        samples += group(number, *lengths, prompt_tokens=rng.randint(50, 250))
    return samples


def test_the_token_budget():
    samples = [Sample([i] * n, [0], 0.0) for i, n in enumerate((5, 5, 5, 20, 2, 2))]
    parts = micro_batches(samples, 10)
    assert parts == [[0, 1], [2, 4, 5], [3]]  # the one of 20 is above the budget and stands alone
    assert [inputs(samples, part) for part in parts] == [10, 9, 20]
    assert micro_batches([], 10) == []


def test_what_fits_is_one_micro_batch_in_its_order():
    samples = gsm8k_like(0, groups=4)
    tokens = inputs(samples, range(len(samples)))
    assert micro_batches(samples, tokens) == [list(range(len(samples)))]
    assert len(micro_batches(samples, tokens - 1)) == 2


def test_a_shared_prompt_counts_once_and_its_samples_stay_together():
    samples = group(1, 5, 5, 5) + group(2, 3, 3) + group(3, 9, 1)
    parts = micro_batches(samples, 36)
    assert [[samples[i].prompt_ids[0] for i in part] for part in parts] == [[1, 1, 1, 2, 2], [3, 3]]
    assert [inputs(samples, part) for part in parts] == [22 + 14, 18]
    apart = micro_batches(samples, 36, share_prompt=False)
    assert all(inputs(samples, part, False) <= 36 for part in apart)
    assert sorted(i for part in apart for i in part) == list(range(len(samples)))


def test_a_group_beyond_the_budget_is_spread_and_has_its_prompt_in_every_part():
    samples = group(1, 5) + group(2, 6, 6, 6, 30, 6, 1, 1) + group(3, 2)
    parts = micro_batches(samples, 20)
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    sizes = [inputs(samples, part) for part in parts]
    assert max(sizes) == 39 and [size for size in sizes if size > 20] == [39]  # the sample of 30 tokens stands alone
    assert [len(part) for part, size in zip(parts, sizes, strict=True) if size == 39] == [1]


@pytest.mark.parametrize("budget", [8192, 16384])
@pytest.mark.parametrize("groups", [8, 32, 128])
def test_one_more_than_the_least_is_enough_for_lengths_like_gsm8ks(groups, budget):
    for seed in range(3):
        samples = gsm8k_like(seed, groups)
        parts = micro_batches(samples, budget)
        sizes = [sum(tokens_by_prompt(samples, part).values()) for part in parts]
        total = sum(tokens_by_prompt(samples, range(len(samples))).values())
        assert max(sizes) <= budget
        assert len(parts) <= math.ceil(total / budget) + 1
        assert sorted(i for part in parts for i in part) == list(range(len(samples)))
        assert parts == sorted(map(sorted, parts))
        assert sum(len({i // 8 for i in part}) for part in parts) - groups <= 0.05 * groups  # groups that are split
