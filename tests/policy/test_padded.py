"""Padded attention: packed tokens come back from their places in the buckets, and padding is zeroed."""

import pytest
import torch

from fastgrpo.policy import varlen
from fastgrpo.policy.varlen import Buckets, PaddedAttention, Segments, collect, lay_out


def test_rows_come_back_from_their_places(monkeypatch):
    monkeypatch.setattr(varlen, "SPARE", 0)
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


@pytest.mark.parametrize("name", ["cpu", "math"])
def test_16_bit_attention_is_that_of_its_inputs_in_fp32_rounded_once(name):
    kernel, part = PaddedAttention(name), Segments([5, 1, 7], [5, 1, 7], "cpu", causal=True)
    query, key, value = (torch.randn(13, heads, 8).bfloat16() for heads in (4, 2, 2))
    out, lse = kernel.forward(query, key, value, part, 0.3)
    wide, wide_lse = kernel.forward(query.float(), key.float(), value.float(), part, 0.3)
    assert torch.equal(out, wide.bfloat16()) and torch.equal(lse, wide_lse)
    low = out, query, key, value, out
    gradients = kernel.backward(*low, lse, part, 0.3)
    expected = kernel.backward(*(tensor.float() for tensor in low), lse, part, 0.3)
    assert all(map(torch.equal, gradients, (gradient.bfloat16() for gradient in expected)))
