"""Turns the rewards of completions that are trained on together into advantages, of completions or of their tokens.

With process_rewards "token", the step rewards that functions log (`log_steps`) become advantages of tokens, as in
DeepSeekMath (arXiv 2402.03300), section 4.1.3. The functions that logged none give each completion its advantage as
they always do, and a token's advantage is the sum of both. A function that logged steps counts by these alone: what it
returned is their summary.

With masked_completions_in_group False, the rewards of masked completions are treated as not given.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.records import Completion
from fastgrpo.loss.advantage import decoupled_advantages, group_advantages, process_advantages
from fastgrpo.rewards.call import Rewards, reward_matrix


def with_advantages(completions: Sequence[Completion], rewards: Rewards, args: GRPOConfig) -> list[Completion]:
    """Turn the rewards of completions that are trained on together into advantages.

    Args:
        completions: [S] completions with rewards, those of a group side by side.
        rewards: The reward functions, whose weights count.
        args: The settings.
    """
    masked = [args.mask_truncated_completions and completion.rollout.truncated for completion in completions]
    left_out = [at for at, it in enumerate(masked) if it and not args.masked_completions_in_group]
    stepped = sorted({name for c in completions for name in c.steps}) if args.process_rewards == "token" else []
    per_function = reward_matrix(completions)
    per_function[left_out] = math.nan
    per_function[:, [rewards.names.index(name) for name in stepped]] = math.nan
    if args.multi_objective_aggregation == "normalize_then_sum":
        advantages = decoupled_advantages(per_function, rewards.weights, args.num_generations, clip=args.advantage_clip)
    else:
        advantages = group_advantages(
            rewards.total(per_function),
            args.num_generations,
            scale=args.scale_rewards,
            baseline=args.advantage_baseline,
            clip=None if stepped else args.advantage_clip,
        )
    done = [
        dataclasses.replace(completion, advantage=advantage, token_advantages=None, masked=out)
        for completion, advantage, out in zip(completions, advantages.tolist(), masked, strict=True)
    ]
    return _with_steps(done, stepped, {*left_out}, rewards, args) if stepped else done


def _with_steps(completions, stepped, left_out, rewards, args):
    """Add the advantages of steps to those of completions, token by token."""
    lengths = [len(completion.rollout.ids) for completion in completions]
    parts = [torch.full((n,), c.advantage, dtype=torch.float64) for n, c in zip(lengths, completions, strict=True)]
    for name in stepped:
        steps = [() if i in left_out else c.steps.get(name, ()) for i, c in enumerate(completions)]
        weight = rewards.weights[rewards.names.index(name)]
        own = process_advantages(steps, lengths, args.num_generations, scale=args.scale_rewards)
        parts = [part + weight * of_tokens for part, of_tokens in zip(parts, own, strict=True)]
    if args.advantage_clip is not None:
        parts = [part.clamp(-args.advantage_clip, args.advantage_clip) for part in parts]
    return [
        dataclasses.replace(completion, advantage=part.mean().item(), token_advantages=part.float())
        for completion, part in zip(completions, parts, strict=True)
    ]
