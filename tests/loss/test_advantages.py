"""Advantages by hand, by TRL's formulas, and by what must not change them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgrpo import decoupled_advantages, group_advantages

NAN = math.nan
RESULT = [-1 / (2**0.5 + 2e-4), 1 / (2**0.5 + 2e-4)]  # of the rewards 0 and 1


def advantages(values, group_size, **knobs):
    return group_advantages(torch.tensor(values, dtype=torch.float64), group_size, **knobs).tolist()


def test_eps_clip_and_no_scale():
    assert advantages([0.0, 2], 2, eps=1.0) == pytest.approx([-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)])
    assert advantages([0.0, 2, 3, 7], 2, scale="none") == [-1, 1, -2, 2]
    assert advantages([0.0, 2, 3, 9], 2, scale="none", clip=2.5) == [-1, 1, -2.5, 2.5]
    assert advantages([1.0, 1, 0, 2], 2, eps=0.0) == pytest.approx([0, 0, -(0.5**0.5), 0.5**0.5])
    assert advantages([-1e150, 1e150], 2) == pytest.approx([-(0.5**0.5), 0.5**0.5])  # the largest that are allowed


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize(("value", "dtype"), [(0.1, torch.float32), (1 / 3, torch.float64), (1e8, torch.float32)])
def test_equal_rewards_give_exact_zeros(scale, baseline, dtype, value):
    # mean(8 x 0.1) is not 0.1 in floating point; the residue over eps would be an advantage made of rounding.
    rewards = torch.tensor([value] * 7 + [NAN] + [0.0] * 4 + [1.0] * 4, dtype=dtype)
    result = group_advantages(rewards, 8, scale=scale, baseline=baseline)
    assert (result[:8] == 0).all() and (result[8:] != 0).all()


REWARDS = st.lists(st.lists(st.floats(-8, 8) | st.just(NAN), min_size=4, max_size=4), min_size=1, max_size=4)


@settings(max_examples=100)
@given(REWARDS, st.sampled_from(["group", "batch", "none"]), st.sampled_from(["group", "leave_one_out"]))
def test_equal_the_formulas_of_trl(groups, scale, baseline):
    """TRL 1.16: nanmean, sample deviation, + 1e-4; RLOO's baseline is (sum of the group - own) / (n - 1)."""
    rewards = torch.tensor(groups, dtype=torch.float64)
    result = group_advantages(rewards.flatten(), 4, scale=scale, baseline=baseline).view(-1, 4)
    assert torch.equal(result, result.nan_to_num(nan=7))
    for row, own in zip(rewards, result, strict=True):
        given = row[~row.isnan()]
        pool = {"group": given, "batch": rewards[~rewards.isnan()], "none": None}[scale]
        for reward, advantage in zip(row.tolist(), own.tolist(), strict=True):
            if math.isnan(reward) or len(given) < 2:
                assert advantage == 0
                continue
            mean = given.mean() if baseline == "group" else (given.sum() - reward) / (len(given) - 1)
            std = 1 if pool is None else pool.std() + 1e-4
            spread = given.max() - given.min()
            assert advantage == pytest.approx(float((reward - mean) / std) if spread > 0 else 0, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("rewards, dtype", [
    ([0.0, 1.0], torch.float64),
    (np.array([0.0, 1.0], dtype=np.float32), torch.float32),
    (np.array([1.0, 0.0])[::-1], torch.float64),
    (np.frombuffer(np.array([0.0, 1.0]).tobytes()), torch.float64),  # read-only: no warning of torch's
    (torch.tensor([0, 1]).bfloat16(), torch.float32),
])  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_lists_arrays_and_tensors(rewards, dtype):
    result = group_advantages(rewards, np.int64(2))
    assert result.dtype == dtype and result.tolist() == pytest.approx(RESULT, rel=1e-6)


REFUSED = {
    "rewards": ([1.0, None], ["a", "b"], [[1.0, 2.0], [3.0]], [10**400, 1], [1j, 2], {1: 2}, "ab", None,
                torch.tensor([1j, 2]), [0.0, 1e151], [1.0, math.inf], [1.0, 2, 3], [[1.0, 2], [3, 4]]),
    "group_size": (0,), "eps": (-1e-4, NAN, "1"), "clip": (0.0, NAN, "1"), "scale": ("std",), "baseline": ("best",),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_by_name(name):
    for value in REFUSED[name]:
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            group_advantages(**{"rewards": [1.0, 2.0], "group_size": 2, name: value})


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
    result = decoupled_advantages(rewards, weights, 8)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-7)  # its nanstd makes n / (n - 1) in fp32
    assert torch.equal(decoupled_advantages(rewards.tolist(), (1, 0.5, 2), 8, clip=0.5), result.clamp(-0.5, 0.5))


def test_wrong_arguments_of_decoupled_advantages_are_refused_by_name():
    two = [[1.0, 2.0], [3.0, 1.0]]
    weights = ([1.0], [1.0, NAN], None, [1e200, 1], [1.7e308, -1.7e308])
    for rewards in ([1.0, 2.0], [[], []], [[1.0, math.inf], [3.0, 1.0]]):
        with pytest.raises(ValueError, match=r"^rewards "):
            decoupled_advantages(rewards, [1, 1], 2)
    for wrong in weights:
        with pytest.raises(ValueError, match=r"^weights "):
            decoupled_advantages(two, wrong, 2)
