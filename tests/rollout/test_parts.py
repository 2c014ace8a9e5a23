"""Parts of attention: plain products against a softmax over the first keys of each slot."""

import pytest
import torch

from fastgrpo.rollout.attention import products

SCALE = 0.3
LENGTHS = [3, 9, 1]


def inputs(kv_heads, queries=2, dtype=torch.float64):
    """query [3, queries, 6, 8], keys and values [3, kv_heads, 9, 8], lengths [3]. Keys that do not count are large."""
    query = torch.randn(3, queries, 6, 8, dtype=dtype)
    keys, values = torch.randn(2, 3, kv_heads, 9, 8, dtype=dtype)
    for slot, length in enumerate(LENGTHS):
        keys[slot, :, length:] = values[slot, :, length:] = 1e3
    return query, keys, values, torch.tensor(LENGTHS, dtype=torch.int32)


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_products_against_a_plain_softmax(kv_heads):
    query, keys, values, lengths = inputs(kv_heads)
    out, lse = products(query, keys, values, lengths, SCALE)
    for slot, length in enumerate(LENGTHS):
        key, value = (tensor[slot, :, :length].repeat_interleave(6 // kv_heads, 0) for tensor in (keys, values))
        scores = torch.einsum("qhd,hld->hql", query[slot], key) * SCALE
        torch.testing.assert_close(lse[slot], scores.logsumexp(-1))
        torch.testing.assert_close(out[slot], torch.einsum("hql,hld->qhd", scores.softmax(-1), value))


def test_products_of_16_bits_have_an_fp32_softmax():
    query, keys, values, lengths = inputs(3)
    exact, exact_lse = products(query, keys, values, lengths, SCALE)
    half = (tensor.bfloat16() for tensor in (query, keys, values))
    out, lse = products(*half, lengths, SCALE)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, atol=0.03, rtol=0.03)
    torch.testing.assert_close(lse.double(), exact_lse, atol=0.03, rtol=0.03)
