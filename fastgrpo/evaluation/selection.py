"""Rejection sampling: of the completions that a policy drew, keep those that are worth learning from.

This is the third stage of DeepSeek-R1 (arXiv 2501.12948, section 2.3.3), which fine-tunes the base model on what a
policy trained by reinforcement wrote: correct, readable, and not repetitive.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence

from fastgrpo.config.settings import SelectionConfig
from fastgrpo.data.records import Completion
from fastgrpo.evaluation.heldout import full_mark
from fastgrpo.rewards.answers import completion_text
from fastgrpo.rewards.call import Rewards, reward_matrix

# Why a completion is left out, in the order in which the reasons are looked for.
REASONS = ("wrong", "empty", "malformed", "truncated", "repetitive", "duplicate", "beyond max_per_prompt")


def repetition(ids: Sequence[int], length: int) -> float:
    """Measure how much of a completion repeats itself.

    repetition = 1 - (distinct runs of `length` tokens) / (runs of `length` tokens)
    """
    runs = [tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def select(
    completions: Sequence[Completion], rewards: Rewards, config: SelectionConfig
) -> tuple[list[tuple[Completion, float]], Counter]:
    """Keep the completions that are worth learning from, at most max_per_prompt of each prompt.

    Kept are those that the first reward function calls right, that have text and the full mark of every function named
    ...format_reward, that ended by themselves, that do not repeat themselves, and that no other one equals. Of more
    than max_per_prompt, those with the highest reward are kept, and of equal ones the first.
    """
    totals = rewards.total(reward_matrix(completions)).tolist()
    forms = [
        (name, full_mark(function))
        for function, name in zip(rewards.functions, rewards.names, strict=True)
        if name.endswith("format_reward")
    ]
    dropped, kept, seen = Counter(), {}, set()
    for completion, total in zip(completions, totals, strict=True):
        prompt = json.dumps(completion.prompt.prompt)
        key = (prompt, json.dumps(completion.content))
        reason = _reason(completion, forms, config)
        if reason is None and key in seen:
            reason = "duplicate"
        if reason is None:
            seen.add(key)
            kept.setdefault(prompt, []).append((completion, total))
        else:
            dropped[reason] += 1
    chosen = []
    for of_prompt in kept.values():
        best = sorted(range(len(of_prompt)), key=lambda i, of_prompt=of_prompt: -of_prompt[i][1])
        best = sorted(best[: config.max_per_prompt])
        dropped["beyond max_per_prompt"] += len(of_prompt) - len(best)
        chosen += [of_prompt[i] for i in best]
    return chosen, +dropped


def _reason(completion, forms: list[tuple[str, Callable]], config):
    """Say why a completion by itself is not worth learning from; None where it is."""
    if not next(iter(completion.rewards.values())) >= 1:
        return "wrong"
    if not completion_text(completion.content):
        return "empty"
    if not all(reached(completion.rewards[name]) for name, reached in forms):
        return "malformed"
    if completion.rollout.truncated:
        return "truncated"
    if repetition(completion.rollout.ids, config.repetition_n_grams) > config.max_repetition:
        return "repetitive"
    return None
