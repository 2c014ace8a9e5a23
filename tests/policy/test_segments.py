"""The layout of packed sequences: where the parts begin, what shares a bucket, and that padding stays small."""

import random

import pytest
import torch

from fastgrpo.policy import varlen
from fastgrpo.policy.varlen import Buckets, Segments


def test_where_sequences_begin_and_end():
    causal = Segments([3, 1, 2], [3, 1, 2], "cpu", causal=True)
    assert causal.cu_seqlens_q.tolist() == [0, 3, 4, 6] and causal.cu_seqlens_q.dtype == torch.int32
    assert causal.cu_seqlens_k is causal.cu_seqlens_q and (causal.max_q, causal.max_k) == (3, 3)
    shared = Segments([3, 1], [5, 9], "cpu", causal=False)
    assert shared.cu_seqlens_k.tolist() == [0, 5, 14] and (shared.max_q, shared.max_k) == (3, 9)


@pytest.mark.parametrize(
    "queries, keys, causal", [([2, 0], [2, 3], False), ([2], [0], False), ([2], [2, 3], False), ([2, 3], [2, 4], True)]
)
def test_parts_that_no_kernel_takes(queries, keys, causal):
    with pytest.raises(AssertionError):
        Segments(queries, keys, "cpu", causal=causal)


def test_short_sequences_are_one_call():
    lengths = [random.Random(i).randint(8, 34) for i in range(256)]
    assert len(Buckets(lengths, lengths, "cpu", causal=True).buckets) <= 4


def test_padding_is_bounded_for_a_long_tail():
    generator = random.Random(0)
    lengths = [min(2048, int(generator.expovariate(1 / 150)) + 1) for _ in range(200)] + [2048]
    buckets = Buckets(lengths, lengths, "cpu", causal=True)
    places = sum(len(bucket.queries) for bucket in buckets)
    scores = sum(len(bucket.queries) ** 2 // bucket.size for bucket in buckets)
    count = len(buckets.buckets)
    assert scores <= varlen.WASTE * sum(n * n for n in lengths) + varlen.SPARE * count
    assert places < 1.5 * sum(lengths) < 0.2 * len(lengths) * max(lengths)
    assert count < 20


def test_only_ragged_keys_that_causality_does_not_hide_have_a_bias():
    for queries, keys, causal, has_bias in (
        ([2, 2], [3, 3], False, False),
        ([2, 2], [3, 1], False, True),
        ([2, 3], [2, 3], True, False),
    ):
        (bucket,) = Buckets(queries, keys, "cpu", causal)
        assert (bucket.bias is not None) == has_bias
    (bucket,) = Buckets([2, 2], [3, 1], "cpu", causal=False)
    assert bucket.bias[:, 0, 0].isinf().tolist() == [[False] * 3, [False, True, True]]
