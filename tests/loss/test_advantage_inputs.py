"""What rewards, weights and knobs of advantages may be, and what is refused by name."""

import math

import numpy as np
import pytest
import torch

from fastgrpo import decoupled_advantages, group_advantages

NAN = math.nan
RESULT = [-1 / (2**0.5 + 2e-4), 1 / (2**0.5 + 2e-4)]


@pytest.mark.parametrize(
    ("rewards", "dtype"),
    [
        ([0.0, 1.0], torch.float64),
        ((0, 1), torch.float64),
        ([False, True], torch.float64),
        ([np.float32(0), np.float64(1)], torch.float64),
        (np.array([0.0, 1.0]), torch.float64),
        (np.array([0.0, 1.0], dtype=np.float32), torch.float32),
        (np.array([0, 1]), torch.float32),
        (np.array([1.0, 0.0])[::-1], torch.float64),
        (np.frombuffer(np.array([0.0, 1.0]).tobytes()), torch.float64),  # read-only: no warning of torch's
    ],
)
@pytest.mark.filterwarnings("error")
def test_lists_tuples_and_arrays(rewards, dtype):
    result = group_advantages(rewards, np.int64(2))
    assert result.dtype == dtype and result.tolist() == pytest.approx(RESULT, rel=1e-6)
    if dtype == torch.float64:
        assert result.tolist() == pytest.approx(RESULT, rel=1e-14)


def test_decoupled_takes_lists_and_arrays():
    rewards = [[0.0, 0.0], [2.0, 200.0], [5.0, 1.0], [5.0, NAN]]
    expected = decoupled_advantages(torch.tensor(rewards).double(), torch.tensor([1.0, 0.5]), 2)
    assert torch.equal(decoupled_advantages(rewards, (1, 0.5), 2), expected)
    assert torch.equal(decoupled_advantages(np.array(rewards), np.array([1.0, 0.5]), 2), expected)


def test_without_eps_groups_without_spread_are_zero_too():
    assert group_advantages([1.0, 1, 0, 2], 2, eps=0.0).tolist() == pytest.approx([0, 0, -(0.5**0.5), 0.5**0.5])
    assert group_advantages([3.0, 3], 2, eps=0, scale="batch").tolist() == [0, 0]
    assert decoupled_advantages([[1.0], [1.0]], [1.0], 2, eps=0).tolist() == [0, 0]


def test_the_largest_rewards_have_advantages():
    assert group_advantages([-1e150, 1e150], 2).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


NUMBERS = "must be a tensor, a numpy array or a list of real numbers"


@pytest.mark.parametrize(
    ("rewards", "group_size", "knobs", "message"),
    [
        ([1.0, None], 2, {}, f"rewards {NUMBERS}: .*None"),
        (["a", "b"], 2, {}, f"rewards {NUMBERS}: .*str"),
        ([[1.0, 2.0], [3.0]], 2, {}, f"rewards {NUMBERS}: "),
        ([10**400, 1], 2, {}, f"rewards {NUMBERS}: int too large"),
        ([1j, 2], 2, {}, f"rewards {NUMBERS}: .*complex"),
        ({1: 2}, 2, {}, f"rewards {NUMBERS}, got dict"),
        ("ab", 2, {}, f"rewards {NUMBERS}, got str"),
        (None, 2, {}, f"rewards {NUMBERS}, got NoneType"),
        (np.array(["a", "b"]), 2, {}, f"rewards {NUMBERS}: .*numpy.str_"),
        (torch.tensor([1j, 2]), 2, {}, f"rewards {NUMBERS}, got torch.complex64"),
        ([0.0, 1e151], 2, {}, r"rewards must be finite and at most 1e\+150 in size .*got 1e\+151"),
        ([0.0, -1e200], 2, {"scale": "none"}, "rewards must be finite and at most"),
        ([1.0, 2.0], 0, {}, r"rewards must be \[S\] with S a multiple of group_size=0"),
        ([1.0, 2.0], 2, {"eps": -1e-4}, "eps must be at least 0, got -0.0001"),
        ([1.0, 2.0], 2, {"eps": NAN}, "eps must be finite, got nan"),
        ([1.0, 2.0], 2, {"eps": "1"}, "eps must be a number, got '1'"),
        ([1.0, 2.0], 2, {"clip": "1"}, "clip must be a number, got '1'"),
    ],
)
def test_what_cannot_be_rewards_is_named(rewards, group_size, knobs, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        group_advantages(rewards, group_size, **knobs)


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ([1.0, 2.0], [1.0], r"rewards must be \[S, F\] with F reward functions, got shape \(2,\)"),
        ([[], []], [], r"rewards must be \[S, F\] with F reward functions, got shape \(2, 0\)"),
        ([[1.0, 2.0], [3.0, 1.0]], [1.0], r"weights must be 2 finite numbers, one a function, got \[1.0\]"),
        ([[1.0, 2.0], [3.0, 1.0]], [1.0, NAN], r"weights must be 2 finite numbers, .*got \[1.0, nan\]"),
        ([[1.0, 2.0], [3.0, 1.0]], None, f"weights {NUMBERS}, got NoneType"),
        ([[1.0, math.inf], [3.0, 1.0]], [1, 1], "rewards must be finite"),
        ([[1.0, 2.0], [3.0, 1.0]], [1e200, 1], r"weights must leave the weighted sums .*got \[1e\+200, 1.0\]"),
        ([[1.0, 2.0], [3.0, 1.0]], [1.7e308, -1.7e308], "weights must leave the weighted sums"),
    ],
)
def test_what_cannot_be_decoupled_is_named(rewards, weights, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        decoupled_advantages(rewards, weights, 2)
