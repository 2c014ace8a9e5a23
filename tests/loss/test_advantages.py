"""Advantages by hand, their baselines and scales, and the rewards that were not given."""

import math

import pytest
import torch

from fastgrpo import decoupled_advantages, group_advantages

NAN = math.nan


def advantages(values, group_size, **knobs):
    return group_advantages(torch.tensor(values, dtype=torch.float64), group_size, **knobs).tolist()


def test_group_scale_by_hand():
    # Means 2 and 4, deviations -1 0 1 and -4 2 2, sample variances (1 + 0 + 1) / 2 and (16 + 4 + 4) / 2.
    one, twelve = 1 + 1e-4, math.sqrt(12) + 1e-4
    expected = [-1 / one, 0, 1 / one, -4 / twelve, 2 / twelve, 2 / twelve]
    assert advantages([1.0, 2, 3, 0, 6, 6], 3) == pytest.approx(expected, rel=1e-14)


def test_eps_is_added_to_the_deviation():
    assert advantages([0.0, 2], 2, eps=1.0) == pytest.approx([-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)])


def test_batch_scale_by_hand():
    # All rewards: mean 2, deviations -2 0 1 1, sample variance 6 / 3 = 2. The centre stays the group's.
    std = math.sqrt(2) + 1e-4
    assert advantages([0.0, 2, 3, 3], 2, scale="batch") == pytest.approx([-1 / std, 1 / std, 0, 0], rel=1e-14)


def test_no_scale_only_centres():
    assert advantages([0.0, 2, 3, 7], 2, scale="none") == [-1, 1, -2, 2]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_nan_is_a_reward_not_given(scale):
    # The third reward takes no part: mean 2, deviations -1 and 1, sample variance 2.
    std = 1 if scale == "none" else math.sqrt(2) + 1e-4
    assert advantages([1.0, 3, NAN], 3, scale=scale) == pytest.approx([-1 / std, 1 / std, 0], rel=1e-14)


def test_batch_deviation_counts_given_rewards_alone():
    # Given: 0 4 1 1, mean 1.5, squares 2.25 + 6.25 + .25 + .25 = 9, over 3.
    std = math.sqrt(3) + 1e-4
    expected = [-2 / std, 2 / std, 0, 0, 0, 0]
    assert advantages([0.0, 4, NAN, 1, NAN, 1], 3, scale="batch") == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8, -0.7, 0.0])
def test_equal_rewards_give_exact_zeros(scale, dtype, value):
    # mean(8 x 0.1) is not 0.1 in floating point; the residue over eps would be an advantage made of rounding.
    rewards = torch.tensor([value] * 8 + [0.0] * 4 + [1.0] * 4, dtype=dtype)
    result = group_advantages(rewards, 8, scale=scale)
    assert (result[:8] == 0).all() and (result[8:] != 0).all()


def test_equal_given_rewards_beside_nan_give_exact_zeros():
    assert advantages([0.1] * 7 + [NAN], 8) == [0] * 8


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_without_any_reward_is_zero_and_harms_no_other(scale):
    alone = advantages([1.0, 2, 4], 3, scale=scale)
    assert advantages([NAN, NAN, NAN, 1, 2, 4], 3, scale=scale) == pytest.approx([0, 0, 0, *alone], rel=1e-14)
    assert advantages([NAN] * 3, 3, scale=scale) == [0, 0, 0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_of_one_are_zero(scale):
    assert advantages([1.0, 5, 2], 1, scale=scale) == [0, 0, 0]


def test_one_given_reward_in_a_group_is_zero():
    assert advantages([NAN, 5.0, NAN], 3) == [0, 0, 0]


def test_clip_bounds_both_sides():
    assert advantages([0.0, 2, 3, 9], 2, scale="none", clip=2.5) == [-1, 1, -2.5, 2.5]


def test_no_rewards_no_advantages():
    assert group_advantages(torch.empty(0), 4).shape == (0,)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float32),
    ],
)
def test_result_dtype(dtype, expected):
    result = group_advantages(torch.tensor([0, 1], dtype=dtype), 2)
    assert result.dtype == expected
    assert result.tolist() == pytest.approx([-1 / (2**0.5 + 2e-4), 1 / (2**0.5 + 2e-4)], rel=1e-6)


def test_rewards_are_left_as_they_were():
    rewards = torch.tensor([1.0, NAN, 3.0, 3.0])
    before = rewards.clone()
    group_advantages(rewards, 2, clip=0.1)
    torch.testing.assert_close(rewards, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_equals_the_formula_of_trl(scale):
    """TRL 1.16, GRPOTrainer: nanmean, sample standard deviation (ddof = 1), + 1e-4."""
    rewards = torch.rand(24)
    groups = rewards.view(-1, 8)
    std = groups.std(1, keepdim=True) if scale == "group" else rewards.std()
    expected = ((groups - groups.mean(1, keepdim=True)) / (std + 1e-4)).flatten()
    torch.testing.assert_close(group_advantages(rewards, 8, scale=scale), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rewards", "group_size", "knobs", "message"),
    [
        ([1.0, 2, 3], 2, {}, r"multiple of group_size=2, got shape \(3,\)"),
        ([[1.0, 2], [3, 4]], 2, {}, r"rewards must be \[S\].*\(2, 2\)"),
        ([1.0, 2], 2, {"scale": "std"}, "scale must be one of group, batch, none, got 'std'"),
        ([1.0, 2], 2, {"baseline": "best"}, "baseline must be one of group, leave_one_out, got 'best'"),
        ([1.0, 2], 2, {"clip": 0.0}, "clip must be positive, got 0.0"),
        ([1.0, 2], 2, {"clip": NAN}, "clip must be finite, got nan"),
        ([1.0, math.inf], 2, {}, "rewards must be finite"),
        ([1.0, -math.inf], 2, {}, "rewards must be finite"),
    ],
)
def test_errors_name_the_argument(rewards, group_size, knobs, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor(rewards), group_size, **knobs)


def test_leave_one_out_by_hand():
    # Group 1 2 6: the others' means are 4, 3.5, 1.5.
    assert advantages([1.0, 2, 6], 3, scale="none", baseline="leave_one_out") == pytest.approx([-3, -1.5, 4.5])
    # The deviation stays that of the rewards: mean 3, squares 4 + 1 + 9, over 2.
    std = math.sqrt(7) + 1e-4
    expected = [-3 / std, -1.5 / std, 4.5 / std]
    assert advantages([1.0, 2, 6], 3, baseline="leave_one_out") == pytest.approx(expected, rel=1e-14)


def test_leave_one_out_counts_given_rewards_alone():
    result = advantages([1.0, NAN, 5.0, NAN, 7.0, NAN], 3, scale="none", baseline="leave_one_out")
    assert result == pytest.approx([-4, 0, 4, 0, 0, 0])  # a reward without others has no baseline: 0


def test_leave_one_out_equals_the_formula_of_trls_rloo():
    """TRL 1.16, RLOOTrainer: baselines = (sum of the group - own) / (n - 1)."""
    rewards = torch.rand(24, dtype=torch.float64)
    rewards[[3, 11, 12]] = NAN
    grouped = rewards.view(-1, 8)
    count = (~grouped.isnan()).sum(1, keepdim=True)
    baselines = (grouped.nansum(1, keepdim=True) - grouped) / (count - 1)
    expected = (grouped - baselines).nan_to_num(nan=0.0).flatten()
    result = group_advantages(rewards, 8, scale="none", baseline="leave_one_out")
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_leave_one_out_keeps_equal_rewards_at_zero(scale):
    assert advantages([0.1] * 8 + [0.0, 1.0] * 4, 8, scale=scale, baseline="leave_one_out")[:8] == [0] * 8


def test_decoupled_by_hand():
    # Both functions give -1/1 and 1/1 times 1 / (sqrt 2 + eps) in the first group; the second has spread in one alone.
    rewards = torch.tensor([[0.0, 0.0], [2.0, 200.0], [5.0, 1.0], [5.0, 3.0]], dtype=torch.float64)
    one, two = 1 / (math.sqrt(2) + 1e-4), 100 / (100 * math.sqrt(2) + 1e-4)
    low, high = one + 0.5 * two, 0.5 * 1 / (math.sqrt(2) + 1e-4)
    std = math.sqrt((2 * low**2 + 2 * high**2) / 3) + 1e-4
    expected = [-low / std, low / std, -high / std, high / std]
    result = decoupled_advantages(rewards, torch.tensor([1.0, 0.5]), 2)
    assert result.tolist() == pytest.approx(expected, rel=1e-12)


def test_decoupled_equals_the_formula_of_trl():
    """TRL 1.16, GRPOTrainer, multi_objective_aggregation="normalize_then_sum"."""
    nanstd = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed (extra: bench)").nanstd
    rewards = torch.rand(32, 3, dtype=torch.float64) * torch.tensor([1.0, 50.0, 0.01])
    rewards[torch.rand(32, 3) < 0.2] = NAN
    rewards[5] = NAN
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    grouped = rewards.view(-1, 8, 3)
    normal = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    total = (normal.view(-1, 3) * weights).nansum(1)
    total[rewards.isnan().all(1)] = NAN
    expected = ((total - total.nanmean()) / (nanstd(total) + 1e-4)).nan_to_num(nan=0.0)
    # Its nanstd makes n / (n - 1) in fp32.
    torch.testing.assert_close(decoupled_advantages(rewards, weights, 8), expected, rtol=1e-6, atol=1e-7)


def test_decoupled_weighs_rewards_alike_whatever_their_unit():
    rewards = torch.rand(16, 2, dtype=torch.float64)
    scaled = rewards * torch.tensor([1.0, 1000.0])
    a, b = (decoupled_advantages(values, torch.ones(2), 8, eps=0.0) for values in (rewards, scaled))
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    summed = [group_advantages(values.sum(1), 8) for values in (rewards, scaled)]
    assert (summed[0] - summed[1]).abs().max() > 0.1


def test_decoupled_groups_without_spread_are_exact_zeros():
    rewards = torch.rand(24, 2, dtype=torch.float64)
    rewards[:8] = torch.tensor([0.1, 1 / 3])
    result = decoupled_advantages(rewards, torch.tensor([1.0, 0.3]), 8)
    assert (result[:8] == 0).all() and (result[8:] != 0).all()
    assert decoupled_advantages(torch.full((8, 2), 0.1), torch.ones(2), 8).tolist() == [0] * 8


def test_decoupled_clip():
    rewards = torch.rand(16, 2)
    free, held = (decoupled_advantages(rewards, torch.ones(2), 8, clip=clip) for clip in (None, 0.5))
    assert free.abs().max() > 0.5 and torch.equal(held, free.clamp(-0.5, 0.5))
