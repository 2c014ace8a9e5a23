"""Turns the rewards of a group of completions into advantages.

Shapes: S completions, G of each prompt side by side. F reward functions.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fastgrpo.loss.objective import NOT_NEGATIVE, POSITIVE

LARGEST = 1e150  # the square of a larger reward overflows fp64: the deviation would be inf, and all advantages 0
SCALES = ("group", "batch", "none")
BASELINES = ("group", "leave_one_out")


def group_advantages(
    rewards: torch.Tensor | Sequence[float], group_size: int, *, scale: str = "group", baseline: str = "group",
    eps: float = 1e-4, clip: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Standardize rewards within each group (GRPO, arXiv 2402.03300, section 4.1.2).

        A_i = (r_i - mean) / (std + eps)

    Args:
        rewards: [S] numbers, at most 1e150 in absolute value: a tensor, a numpy array, or a list or tuple. The G
            completions of a prompt are adjacent. NaN marks a missing reward: mean and deviation skip it, and its
            advantage is 0.
        group_size: G, the completions of one prompt.
        scale: Divisor of the centred rewards. "group" is the sample standard deviation of the group. "batch" is the
            standard deviation of all rewards (PPO Lite, arXiv 2508.08221). "none" is 1 (Dr. GRPO, arXiv 2503.20783).
        baseline: Subtracted from each reward. "group" is the mean of the group. "leave_one_out" is the mean of the
            group's other rewards (RLOO, arXiv 2402.14740, which uses scale "none").
        eps: Added to the standard deviation, in units of the reward.
        clip: Bound on |A|, or None.

    Returns:
        [S] advantages: fp64 for fp64 rewards, lists and tuples, else fp32. A group of equal rewards gets exact zeros.

    Raises:
        ValueError: The rewards are not numbers, one of them is infinite or too large, S is not a multiple of G, or
            another argument is out of range.
    """
    rewards = _numbers(rewards, "rewards")
    if rewards.ndim != 1 or group_size < 1 or len(rewards) % group_size:
        raise ValueError(
            f"rewards must be [S] with S a multiple of group_size={group_size}, got shape {tuple(rewards.shape)}"
        )
    NOT_NEGATIVE.check("eps", eps)
    for name, value, choices in (("scale", scale, SCALES), ("baseline", baseline, BASELINES)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    groups = rewards.double().reshape(-1, group_size)
    large = groups[groups.abs() > LARGEST]
    if len(large):
        raise ValueError(
            f"rewards must be finite and at most {LARGEST} in absolute value (NaN for a missing one), got {large[0]}"
        )
    given = ~groups.isnan()
    centred = torch.where(given, groups - groups.nanmean(1, keepdim=True), 0.0)  # r_i - mean
    # Equal rewards get exact 0: dividing the mean's rounding error by eps would amplify it to noise.
    low = torch.where(given, groups, math.inf).amin(1, keepdim=True)
    high = torch.where(given, groups, -math.inf).amax(1, keepdim=True)
    centred = torch.where(low < high, centred, 0.0)
    deviation = None
    if scale == "group":
        deviation = sample_std(centred, given, dim=1)
    elif scale == "batch":
        values = torch.where(given, groups, 0.0).flatten()
        values = torch.where(given.flatten(), values - values.sum() / given.sum().clamp(min=1), 0.0)
        deviation = sample_std(values, given.flatten(), dim=0)
    if baseline == "leave_one_out":
        # r_i - (mean of the others) = (r_i - mean) n / (n - 1), with n rewards that are not NaN (arXiv 2402.14740)
        count = given.sum(1, keepdim=True)
        centred = centred * count / (count - 1).clamp(min=1)
    if deviation is not None:
        centred = _standardized(centred, deviation, eps)  # (r_i - mean) / (std + eps)
    return _clipped(centred.flatten(), clip).to(rewards.dtype if rewards.dtype == torch.float64 else torch.float32)


def decoupled_advantages(
    rewards: torch.Tensor | Sequence[Sequence[float]], weights: torch.Tensor | Sequence[float], group_size: int, *,
    eps: float = 1e-4, clip: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Standardize each reward function separately, then their weighted sum (GDPO, arXiv 2601.05242).

        A_i = x_i / (std(x) + eps),   x_i = sum_k w_k A_ik

    A_ik is the advantage that `group_advantages` computes from the rewards of function k. A reward with a small spread
    therefore counts as much as one with a large spread. Completions whose rewards differ but have equal sums get
    different advantages. TRL also subtracts the mean of x, which is 0 up to rounding.

    Args:
        rewards: [S, F] numbers, as in `group_advantages`. NaN marks a missing reward.
        weights: [F] finite numbers, the weight of each reward function.
        group_size: G, the completions of one prompt.
        eps: Added to both standard deviations.
        clip: Bound on |A|, or None.

    Returns:
        [S] fp64 advantages, 0 where no function gave a reward.

    Raises:
        ValueError: As in `group_advantages`; or the weights are not [F] finite numbers, or so large that the deviation
            of the sums would be infinite.
    """
    rewards, weights = _numbers(rewards, "rewards"), _numbers(weights, "weights")
    if rewards.ndim != 2 or not rewards.shape[1]:
        raise ValueError(f"rewards must be [S, F] with F reward functions, got shape {tuple(rewards.shape)}")
    if weights.shape != rewards.shape[1:] or not weights.isfinite().all():
        raise ValueError(f"weights must be {rewards.shape[1]} finite numbers, one per function, got {weights.tolist()}")
    parts = [group_advantages(column, group_size, eps=eps) for column in rewards.double().T]
    total = (torch.stack(parts, 1) * weights.to(rewards.device)).sum(1)  # x_i = sum_k w_k A_ik
    if not (total.abs() <= LARGEST).all():  # larger squares overflow fp64
        raise ValueError(
            f"weights must keep the weighted sums of advantages at most {LARGEST} in absolute value, got "
            f"{weights.tolist()}; use smaller weights"
        )
    deviation = sample_std(total, ~rewards.isnan().all(1), dim=0)
    return _clipped(_standardized(total, deviation, eps), clip)


def process_advantages(
    steps: Sequence[Sequence[tuple[int, float]]], lengths: Sequence[int], group_size: int, *, scale: str = "group"
) -> list[torch.Tensor]:  # fmt: skip
    """Turn step rewards into token advantages (GRPO, arXiv 2402.03300, section 4.1.3).

        A_it = sum of a_ij over the steps j of completion i with end_ij >= t,   a_ij = (r_ij - mean) / (std + 1e-4)

    Mean and deviation are taken over all step rewards of the group. `steps` has a sequence, maybe empty, of pairs (end,
    reward) for each completion, and `lengths` its tokens. The result has [T_i] fp64 for each; equal rewards give exact
    zeros. Token t is counted from 1, and the ends increase. The other arguments are as for `group_advantages`.
    """
    for i, (of_one, length) in enumerate(zip(steps, lengths, strict=True)):
        ends = [end for end, _ in of_one]
        if any(end <= before for before, end in zip([0, *ends], ends, strict=False)) or (ends and ends[-1] > length):
            raise ValueError(f"the ends of steps must increase from 1 to at most {length}, got {ends} of sample {i}")
    width = max([1, *map(len, steps)])
    rewards = torch.full((len(steps), width), math.nan, dtype=torch.float64)
    for row, of_one in zip(rewards, steps, strict=True):
        row[: len(of_one)] = torch.tensor([reward for _, reward in of_one], dtype=torch.float64)
    of_steps = group_advantages(rewards.flatten(), group_size * width, scale=scale).view(-1, width)
    advantages = [torch.zeros(length, dtype=torch.float64) for length in lengths]
    for of_one, values, of_tokens in zip(steps, of_steps, advantages, strict=True):
        for (end, _), value in zip(of_one, values, strict=False):
            of_tokens[:end] += value
    return advantages


def _numbers(values: Any, name: str) -> torch.Tensor:
    """Convert Python numbers to an fp64 tensor, and a numpy array or tensor to a tensor of its dtype."""
    must = f"{name} must be a tensor, a numpy array or a list of real numbers"
    try:
        if isinstance(values, list | tuple):
            values = torch.tensor(values, dtype=torch.float64)
        elif hasattr(values, "__array__") and not isinstance(values, torch.Tensor):
            values = torch.tensor(values.__array__().copy())  # copied: torch does not support negative strides
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{must}: {error}") from None
    if not isinstance(values, torch.Tensor):
        raise ValueError(f"{must}, got {type(values).__name__}")
    if values.is_complex():
        raise ValueError(f"{must}, got {values.dtype}")
    return values


def _standardized(centred, deviation, eps):
    """Divide by (deviation + eps). 0 stays 0, even if the divisor is 0."""
    return torch.where(centred == 0, 0.0, centred / (deviation + eps))


def _clipped(advantages, clip):
    if clip is None:
        return advantages
    POSITIVE.check("clip", clip)
    return advantages.clamp(-clip, clip)


def sample_std(centred: torch.Tensor, given: torch.Tensor, dim: int) -> torch.Tensor:
    """Return sqrt(sum of squares / (n - 1)) over the n given entries, 0 if n < 2. `centred` is 0 at the others."""
    count = given.sum(dim, keepdim=True)
    return (centred.square().sum(dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
