"""The rollout's kernels on a GPU at real sizes: equal bits in any batch, 64-bit offsets."""

import pytest
import torch

pytest.importorskip("triton")

from decode_cases import random_decode

from fastgrpo.kernels.decode import group_decode
from fastgrpo.kernels.sampling import sample

pytestmark = pytest.mark.gpu

FILTERS = [{}, {"top_k": 50}, {"top_k": 1000}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.01},
           {"top_k": 20, "top_p": 0.95, "min_p": 0.01}]  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_are_the_same_in_any_batch(filters):
    logits, uniforms = torch.randn(300, 151_936, device="cuda") * 2.5, torch.rand(300, device="cuda")
    first, second = (sample(logits, uniforms, temperature=0.8, **filters) for _ in range(2))
    part = sample(logits[250:251], uniforms[250:251], temperature=0.8, **filters)
    assert all(torch.equal(a, b) and torch.equal(a[250:251], c) for a, b, c in zip(first, second, part, strict=True))


def test_slots_past_2_to_the_31_elements():
    """65 slots of 2 x 131,072 x 128: the last one begins at the element 2^31."""
    case = random_decode([[64]], [3], [0] * 64 + [5], heads=(4, 2), depth=128, dtype=torch.bfloat16, device="cuda")
    expected = group_decode(**case)
    for name in ("keys", "values"):
        large = torch.zeros(65, 2, 131_072, 128, dtype=torch.bfloat16, device="cuda")
        large[64, :, :5] = case[name][64, :, :5]
        case[name] = large
    torch.testing.assert_close(group_decode(**case), expected)
