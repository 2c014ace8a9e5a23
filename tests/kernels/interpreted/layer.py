"""The small operations of a decode step's layers on the CPU, against plain PyTorch.

Run by test_interpreted.py, in a process with TRITON_INTERPRET=1.
"""

from copy import deepcopy

import pytest
import torch
from decode_cases import random_rotation

from fastgrpo.kernels import layer, reference

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
@pytest.mark.parametrize(
    "case",
    [((7, 2), 16, False, torch.float32, (0, 2, 1)), ((4, 4), 20, True, torch.float32, (2, 0, 1)),
     ((1, 1), 8, False, torch.bfloat16, (0, 1, 2)), ((4, 2), 16, True, torch.bfloat16, (0, 2, 1))],
    ids=str,
)  # fmt: skip
def test_rotate_and_store(case, bf16):
    dtype, case = case[3], random_rotation(3, *case)
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
    case = random_rotation(0, (2, 1), 8, False, torch.float32)
    assert layer.rotate_and_store(**case).shape == (0, 2, 8)
    assert layer.add_rms_norm(torch.empty(0, 8), None, torch.ones(8), 1e-5).shape == (0, 8)
    assert layer.silu_mul(torch.empty(0, 8)).shape == (0, 4)
