"""Summarizes the completions and rewards of a step, as metrics for metrics.jsonl and lines for samples.jsonl.

Shapes: S completions, those of a group side by side, G completions a group; F reward functions.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from fastgrpo.data.records import Completion
from fastgrpo.data.token_text import TokenText
from fastgrpo.rewards.call import reward_matrix
from fastgrpo.rewards.notes import SAMPLE_COLUMNS


def reward_metrics(completions: Sequence[Completion], totals: torch.Tensor, group_size: int) -> dict[str, float]:
    """Measure how the completions of a step were rewarded.

    Args:
        completions: [S], with rewards and advantages.
        totals: [S] total rewards, NaN where none was given.
        group_size: G.
    """
    per_function = reward_matrix(completions)
    advantages = torch.tensor([completion.advantage for completion in completions], dtype=torch.float64)
    sizes = torch.tensor([_advantage_size(completion) for completion in completions], dtype=torch.float64)
    informative = torch.tensor([completion.informative for completion in completions])
    spread = informative.view(-1, group_size).any(1).double().mean().item()
    values = {
        "reward": totals.nanmean().item(),
        "reward_std": totals.view(-1, group_size).std(1).nanmean().item(),
        "accuracy": (per_function[:, 0] >= 1).double().mean().item(),
        "frac_reward_zero_std": 1 - spread,
        "frac_informative": spread,
        "advantage/mean": advantages.mean().item(),
        "advantage/abs_mean": sizes.mean().item(),
    }
    for name, column in zip(completions[0].rewards, per_function.T, strict=True):
        given = column[~column.isnan()]
        if not len(given):
            continue
        values[f"rewards/{name}/mean"] = given.mean().item()
        values[f"rewards/{name}/std"] = given.std(correction=0).item()
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _advantage_size(completion):
    """Return the magnitude of a completion's advantage, which is the mean over its tokens where each has its own."""
    own = completion.token_advantages
    return abs(completion.advantage) if own is None else own.double().abs().mean().item()


def length_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Measure how long the completions of a step were, in tokens, and how many were truncated.

    Args:
        completions: [S].
    """
    lengths = [len(completion.rollout.ids) for completion in completions]
    ended = [len(completion.rollout.ids) for completion in completions if not completion.rollout.truncated]
    of_ended = (
        {
            "completions/mean_terminated_length": sum(ended) / len(ended),
            "completions/min_terminated_length": min(ended),
            "completions/max_terminated_length": max(ended),
        }
        if ended
        else {}
    )
    return of_ended | {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(completion.rollout.truncated for completion in completions) / len(lengths),
    }


def rates(tokens: int, rollout_seconds: float, seconds: float) -> dict[str, float]:
    """Measure how fast a step and its rollout were."""
    values = {"step_time": seconds, "tokens/s": tokens / seconds}
    if rollout_seconds:
        values |= {"rollout/tokens/s": tokens / rollout_seconds, "rollout/share": rollout_seconds / seconds}
    return values


def logged_groups(groups: int, group_size: int, most: int) -> list[int]:
    """Choose the groups whose completions samples.jsonl keeps: whole ones, evenly spread, the first among them."""
    count = min(max(most // group_size, 1), groups)
    return [i * groups // count for i in range(count)]


def sample_rows(
    step: int, completions: Sequence[Completion], group_size: int, groups: Sequence[int], text: TokenText
) -> Iterator[dict]:
    """Make the lines of samples.jsonl.

    Args:
        step: The step.
        completions: [S], after the update.
        group_size: G.
        groups: The indices of the groups that are kept.
        text: Finds where tokens end, see `TokenText`.
    """
    for group in groups:
        for completion in completions[group * group_size : (group + 1) * group_size]:
            rollout, ratios = completion.rollout, completion.ratios
            values = (
                step,
                group,
                completion.prompt.prompt,
                completion.content,
                {name: None if math.isnan(value) else value for name, value in completion.rewards.items()},
                completion.advantage,
                rollout.finish_reason,
                len(rollout.ids),
                len(completion.clipped) / max(len(rollout.ids), 1),
                text.ends(rollout.ids),
                [round(value, 4) for value in rollout.logps.tolist()],
                *(() if ratios is None else ([round(value, 4) for value in ratios], list(completion.clipped))),
            )
            yield dict(zip(SAMPLE_COLUMNS, values, strict=False)) | completion.extras
