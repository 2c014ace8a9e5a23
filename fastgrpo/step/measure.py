"""What a step's completions and rewards say, as numbers for metrics.jsonl and lines for samples.jsonl.

Shapes: S completions, group-contiguous, G a group; F reward functions.
"""

import math


def reward_metrics(names, per_function, totals, advantages, group_size):
    """How the completions of a step were rewarded.

    Args:
        names: [F]. per_function: [S, F]. totals: [S]. advantages: [S]. NaN is a reward that was not given.

    Returns:
        metrics by name; one that nothing was given for is absent.
    """
    spread = (advantages.view(-1, group_size) != 0).any(1).double().mean().item()
    values = {
        "reward": totals.nanmean().item(),
        "reward_std": totals.view(-1, group_size).std(1).nanmean().item(),
        "accuracy": (per_function[:, 0] >= 1).double().mean().item(),
        "frac_reward_zero_std": 1 - spread,
        "frac_informative": spread,
        "advantage/mean": advantages.mean().item(),
        "advantage/abs_mean": advantages.abs().mean().item(),
    }
    for name, column in zip(names, per_function.T, strict=True):
        given = column[~column.isnan()]
        if not len(given):
            continue
        values[f"rewards/{name}/mean"] = given.mean().item()
        values[f"rewards/{name}/std"] = given.std(correction=0).item()
    return {name: value for name, value in values.items() if not math.isnan(value)}


def rollout_metrics(rollouts):
    """How long the completions of a step were, and how many were truncated."""
    lengths = [len(rollout.ids) for rollout in rollouts]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
    }


def rates(rollouts, rollout_seconds, seconds):
    """How fast a step and its generation were. Completions that were aborted do not count."""
    tokens = sum(len(rollout.ids) for rollout in rollouts)
    return {
        "step_time": seconds,
        "tokens/s": tokens / seconds,
        "rollout/tokens/s": tokens / rollout_seconds,
        "rollout/share": rollout_seconds / seconds,
    }


def sample_rows(step, experience, names, group_size):
    """Lines of samples.jsonl: every completion of a step's `Experience`. names: [F], of reward functions."""
    for i, (sample, rollout) in enumerate(zip(experience.samples, experience.rollouts, strict=True)):
        verdicts = zip(names, experience.per_function[i].tolist(), strict=True)
        yield {
            "step": step,
            "group": i // group_size,
            "prompt": experience.prompts[i].prompt,
            "completion": experience.completions[i],
            "rewards": {name: None if math.isnan(value) else value for name, value in verdicts},
            "advantage": sample.advantage,
            "finish_reason": rollout.finish_reason,
            "tokens": len(rollout.ids),
            "clipped": float(sample.clipped),
            **{name: values[i] for name, values in experience.extras.items()},
        }
