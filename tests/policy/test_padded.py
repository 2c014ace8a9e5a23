"""Layout by sequence: what shares a bucket, and that padding stays small."""

import random

import torch

from fastgrpo.policy import padded
from fastgrpo.policy.padded import Buckets, collect, lay_out


def test_rows_come_back_from_their_places(monkeypatch):
    monkeypatch.setattr(padded, "SPARE", 0)
    lengths = [3, 30, 2, 3, 1, 28]
    buckets = Buckets(lengths, lengths, "cpu", causal=True)
    assert sum(bucket.size for bucket in buckets) == 6 and len(buckets.buckets) > 1
    packed = torch.randn(sum(lengths), 2, 4)
    parts = [lay_out(packed, bucket.queries, bucket.size, 2) for bucket in buckets]
    assert torch.equal(collect(parts, buckets.place_q), packed)


def test_key_heads_repeat_and_unused_places_are_zeroed():
    (bucket,) = Buckets([3, 2], [3, 2], "cpu", causal=True)
    packed = torch.arange(1.0, 11).view(5, 2, 1)  # row n has heads 2n+1 and 2n+2
    assert lay_out(packed, bucket.keys, bucket.size, 4)[0, :, 0, 0].tolist() == [1, 1, 2, 2]
    first_head = lay_out(packed, bucket.queries, bucket.size, 2, zero=bucket.unused)[:, 0, :, 0]
    assert first_head.tolist() == [[1, 3, 5], [7, 9, 0]]


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
    assert scores <= padded.WASTE * sum(n * n for n in lengths) + padded.SPARE * count
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
