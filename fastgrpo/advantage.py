"""Rewards of a group of completions -> advantages.

Shapes: S completions, group-contiguous: B prompts times G completions each.
"""

import math

import torch

SCALES = ("group", "batch", "none")


def group_advantages(rewards, group_size, *, scale="group", eps=1e-4, clip=None):
    """A_i = (r_i - mean(r of the group)) / (std + eps): group-relative advantages (GRPO, arXiv 2402.03300, sec. 4.1.2).

    Args:
        rewards: [S] floats; the G completions of a prompt stand side by side. NaN marks a reward that was not given:
            it takes no part in the mean and the deviation, and its advantage is 0.
        group_size: G.
        scale: "group" divides by the group's sample standard deviation; "batch" by that of all rewards (PPO Lite,
            arXiv 2508.08221); "none" only centres (Dr. GRPO, arXiv 2503.20783).
        eps: added to the deviation, in units of the reward.
        clip: bound on |A|, or None.

    Returns:
        [S] fp32 (fp64 for fp64 rewards). A group whose given rewards are all equal gets exact zeros.

    Raises:
        ValueError: S is not a multiple of G, an unknown scale, or an infinite reward.
    """
    if rewards.ndim != 1 or group_size < 1 or len(rewards) % group_size:
        raise ValueError(
            f"rewards must be [S] with S a multiple of group_size={group_size}, got shape {tuple(rewards.shape)}"
        )
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    if rewards.isinf().any():
        raise ValueError(f"rewards must be finite (NaN for one that was not given), got {rewards.tolist()}")
    groups = rewards.double().view(-1, group_size)
    given = ~groups.isnan()
    centred = torch.where(given, groups - groups.nanmean(1, keepdim=True), 0.0)
    # Rounding of the mean must not turn equal rewards into tiny advantages, which eps would blow up to noise.
    low = torch.where(given, groups, math.inf).amin(1, keepdim=True)
    high = torch.where(given, groups, -math.inf).amax(1, keepdim=True)
    centred = torch.where(low < high, centred, 0.0)
    if scale == "group":
        centred = centred / (_sample_std(centred, given, dim=1) + eps)
    elif scale == "batch":
        values = torch.where(given, groups, 0.0).flatten()
        values = torch.where(given.flatten(), values - values.sum() / given.sum().clamp(min=1), 0.0)
        centred = centred / (_sample_std(values, given.flatten(), dim=0) + eps)
    if clip is not None:
        centred = centred.clamp(-clip, clip)
    return centred.flatten().to(rewards.dtype if rewards.dtype == torch.float64 else torch.float32)


def _sample_std(centred, given, dim):
    """Square root of sum of squares / (n - 1) over the given entries; 0 where n < 2. `centred` is 0 elsewhere."""
    count = given.sum(dim, keepdim=True)
    return (centred.square().sum(dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
