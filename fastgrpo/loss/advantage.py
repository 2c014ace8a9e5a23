"""Rewards of a group of completions -> advantages.

Shapes: S completions, group-contiguous: B prompts times G completions each. F reward functions.
"""

import math

import torch

SCALES = ("group", "batch", "none")
BASELINES = ("group", "leave_one_out")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


def group_advantages(rewards, group_size, *, scale="group", baseline="group", eps=1e-4, clip=None):
    """A_i = (r_i - b_i) / (std + eps), b the group's mean: group-relative advantages (GRPO, arXiv 2402.03300, 4.1.2).

    Args:
        rewards: [S] floats; the G completions of a prompt stand side by side. NaN marks a reward that was not given:
            it takes no part in the mean and the deviation, and its advantage is 0.
        group_size: G.
        scale: "group" divides by the group's sample standard deviation; "batch" by that of all rewards (PPO Lite,
            arXiv 2508.08221); "none" only centres (Dr. GRPO, arXiv 2503.20783).
        baseline: "group" is the mean of the group; "leave_one_out" that of its other rewards, which makes r_i - b_i
            larger by n / (n - 1), n the rewards given (RLOO, arXiv 2402.14740, with scale "none").
        eps: added to the deviation, in units of the reward.
        clip: bound on |A|, or None.

    Returns:
        [S] fp32 (fp64 for fp64 rewards). A group whose given rewards are all equal gets exact zeros.

    Raises:
        ValueError: S is not a multiple of G, an unknown scale or baseline, or an infinite reward.
    """
    if rewards.ndim != 1 or group_size < 1 or len(rewards) % group_size:
        raise ValueError(
            f"rewards must be [S] with S a multiple of group_size={group_size}, got shape {tuple(rewards.shape)}"
        )
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    if baseline not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {baseline!r}")
    if rewards.isinf().any():
        raise ValueError(f"rewards must be finite (NaN for one that was not given), got {rewards.tolist()}")
    groups = rewards.double().view(-1, group_size)
    given = ~groups.isnan()
    centred = torch.where(given, groups - groups.nanmean(1, keepdim=True), 0.0)
    # Rounding of the mean must not turn equal rewards into tiny advantages, which eps would blow up to noise.
    low = torch.where(given, groups, math.inf).amin(1, keepdim=True)
    high = torch.where(given, groups, -math.inf).amax(1, keepdim=True)
    centred = torch.where(low < high, centred, 0.0)
    deviation = None
    if scale == "group":
        deviation = _sample_std(centred, given, dim=1)
    elif scale == "batch":
        values = torch.where(given, groups, 0.0).flatten()
        values = torch.where(given.flatten(), values - values.sum() / given.sum().clamp(min=1), 0.0)
        deviation = _sample_std(values, given.flatten(), dim=0)
    if baseline == "leave_one_out":
        count = given.sum(1, keepdim=True)
        centred = centred * count / (count - 1).clamp(min=1)
    if deviation is not None:
        centred = centred / (deviation + eps)
    return _clipped(centred.flatten(), clip).to(rewards.dtype if rewards.dtype == torch.float64 else torch.float32)


def decoupled_advantages(rewards, weights, group_size, *, eps=1e-4, clip=None):
    """A_i = x_i / (std(x) + eps), x_i = sum_k w_k A_ik: each reward function's advantages within the group, as
    `group_advantages` makes them, then their weighted sum over the deviation of all sums (GDPO, arXiv 2601.05242). A
    reward of small spread so counts as much as one of large spread, and groups keep apart what a sum would confound.

    The mean of x, which TRL subtracts, is 0; taking away its rounding would give groups without spread an advantage.

    Args:
        rewards: [S, F]; NaN marks one that was not given. weights: [F]. group_size, eps, clip: as `group_advantages`.

    Returns:
        [S] fp64; 0 where no function gave a reward.
    """
    parts = [group_advantages(column, group_size, eps=eps) for column in rewards.double().T]
    total = (torch.stack(parts, 1) * weights).sum(1)
    return _clipped(total / (_sample_std(total, ~rewards.isnan().all(1), dim=0) + eps), clip)


def _clipped(advantages, clip):
    if clip is None:
        return advantages
    if not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    return advantages.clamp(-clip, clip)


def _sample_std(centred, given, dim):
    """Square root of sum of squares / (n - 1) over the given entries; 0 where n < 2. `centred` is 0 elsewhere."""
    count = given.sum(dim, keepdim=True)
    return (centred.square().sum(dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
