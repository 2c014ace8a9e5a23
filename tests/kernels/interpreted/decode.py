"""Decode attention over shared prompts, and the small operations of a decode step's layers, against plain PyTorch."""

import math
from copy import deepcopy

import pytest
import torch
from decode_cases import grown, random_decode, random_rotation

from fastgrpo.kernels import launch, layer, reference
from fastgrpo.kernels.decode import group_decode

GROUPS = {  # name -> members, lengths of the prompts and of the lanes, in any order, with some left out
    "ragged": ([[0, 2, -1, 1], [3, -1, 4, -1], [-1] * 4], [37, 13, 20], [3, 40, 1, 0, 17, 5, 0]),
    "one lane": ([[0]], [5], [1]),
    "sixteen": ([[15, *range(15)]], [33], [1, 16, 17, 0, *range(12)]),
    "no prompt": ([[-1, -1]], [9], [4, 0]),
    "empty prompt": ([[1, 0]], [0], [4, 0]),
    "no groups": ([], [], [7, 16, 0]),
}


# "mixed" has both of the other layouts, one for keys and one for values.
@pytest.mark.parametrize("layout", ("mixed", *(pytest.param(x, marks=pytest.mark.slow) for x in ("KC", "CK"))))
@pytest.mark.parametrize("heads", ((14, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in ((2, 2), (6, 1)))))
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x == "sixteen" else x for x in GROUPS])
def test_group_decode(name, heads, layout):
    case = random_decode(*GROUPS[name], heads=heads, depth=16, layout=layout)
    torch.testing.assert_close(group_decode(**case), reference.group_decode(**case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "depth"), [(torch.float32, 80), (torch.float16, 24)])
def test_depths_and_dtypes(dtype, depth):
    case = random_decode(*GROUPS["ragged"], heads=(7, 1), depth=depth, dtype=dtype)
    out = group_decode(**case)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out, reference.group_decode(**case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("groups, heads, rows", [
    (([[*range(12)]], [21], [2] * 12), (6, 1), 72),
    pytest.param(GROUPS["ragged"], (71, 1), 71, marks=pytest.mark.slow),
], ids=["of many lanes", "of many heads of a key head"])  # fmt: skip
def test_more_query_rows_than_a_block_holds(groups, heads, rows):
    case = random_decode(*groups, heads=heads, depth=16)
    assert launch.decode_blocks(rows, 16, torch.float32).rows < rows
    torch.testing.assert_close(group_decode(**case), reference.group_decode(**case), rtol=1e-5, atol=1e-5)


def test_scores_far_apart():
    """A key 90 nats above the rest in the prompt, the suffix, or both: the merge neither overflows nor loses it."""
    for prompt, suffix in ((90.0, 0.0), (0.0, 90.0), (90.0, 90.0), (-900.0, -900.0)):
        case = random_decode([[1, 0]], [20], [18, 3], heads=(2, 2), depth=16)
        case["query"][:] = 1.0
        case["prompt_keys"][:, :, 7] = prompt / 16 / case["scale"]
        case["keys"][:, :, 1] = suffix / 16 / case["scale"]
        torch.testing.assert_close(group_decode(**case), reference.group_decode(**case), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [dict, grown])
def test_does_not_read_beyond_the_lengths(layout):
    case = layout(random_decode(*GROUPS["ragged"], heads=(4, 2), depth=16))
    expected = group_decode(**case)
    torch.testing.assert_close(expected, reference.group_decode(**case), rtol=1e-5, atol=1e-5)
    for prefix in ("", "prompt_"):
        for slot, length in enumerate(case[f"{prefix}lengths"].tolist()):
            case[f"{prefix}keys"][slot, :, length:] = math.nan
            case[f"{prefix}values"][slot, :, length:] = math.nan
    assert torch.equal(group_decode(**case), expected)
    assert group_decode(**random_decode([[-1]], [4], [], heads=(4, 2), depth=16)).shape == (0, 4, 16)


CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float16: {"rtol": 2e-3, "atol": 1e-3},
         torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}}  # fmt: skip


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("added", [True, False])
def test_add_rms_norm(added, dtype, bf16):
    hidden, other = torch.randn(2, 3, 40).to(dtype) * 3
    other, weight, mine = other if added else None, torch.randn(40).to(dtype), hidden.clone()
    out = layer.add_rms_norm(mine, other, weight, 1e-5)
    expected = reference.add_rms_norm(hidden, other, weight, 1e-5)
    assert torch.equal(mine, hidden)
    torch.testing.assert_close(out, expected, **CLOSE[dtype])


# Query and key heads, width, whether Qwen3 normalizes them, dtype, and order of slots, heads and tokens in memory.
@pytest.mark.parametrize("case", [
    ((7, 2), 16, False, torch.float32, (0, 2, 1)), ((4, 4), 20, True, torch.float32, (2, 0, 1)),
    ((1, 1), 8, False, torch.bfloat16, (0, 1, 2)), ((4, 2), 16, True, torch.bfloat16, (0, 2, 1)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("layout", [dict, grown])
def test_rotate_and_store(layout, case, bf16):
    dtype, case = case[3], layout(random_rotation(3, *case))
    mine = deepcopy(case)
    out, expected = layer.rotate_and_store(**mine), reference.rotate_and_store(**case)
    torch.testing.assert_close(out, expected, **CLOSE[dtype])
    torch.testing.assert_close(mine["keys"], case["keys"], **CLOSE[dtype])
    assert torch.equal(mine["values"], case["values"])  # all other tokens too


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_silu_mul(dtype, bf16):
    packed = (torch.randn(3, 2 * 70) * 5).to(dtype)
    packed[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -20.0])
    torch.testing.assert_close(layer.silu_mul(packed), reference.silu_mul(packed), **CLOSE[dtype])


def test_no_lanes():
    assert layer.rotate_and_store(**random_rotation(0, (2, 1), 8, False, torch.float32)).shape == (0, 2, 8)
    assert layer.add_rms_norm(torch.empty(0, 8), None, torch.ones(8), 1e-5).shape == (0, 8)
    assert layer.silu_mul(torch.empty(0, 8)).shape == (0, 4)
