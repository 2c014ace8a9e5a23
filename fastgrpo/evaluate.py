"""Accuracy on held-out prompts, through the same rollout and rewards as training."""

import dataclasses
import time

from fastgrpo.data import to_completion, to_prompt


def evaluate(engine, tokenizer, rows, rewards, sampling, trainer_state, progress=None):
    """Greedy completions of `rows`, one each, scored.

    Args:
        engine: `RolloutEngine`. rows: data rows. rewards: `Rewards`. sampling: the run's; temperature 0 replaces its
            own. trainer_state: handed to the reward functions. progress: as in `RolloutEngine.generate`.

    Returns:
        metrics: eval/accuracy, eval/rewards/NAME/mean, eval/mean_length, eval/time.
    """
    started = time.perf_counter()
    prompts = [to_prompt(row, tokenizer) for row in rows]
    greedy = dataclasses.replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    rollouts = engine.generate([prompt.ids for prompt in prompts], 1, greedy, progress)
    completions = [to_completion(p, rollout.ids, tokenizer) for p, rollout in zip(prompts, rollouts, strict=True)]
    per_function = rewards(
        prompts,
        completions,
        [rollout.ids for rollout in rollouts],
        trainer_state=trainer_state,
        log_metric=lambda name, value: None,
        log_extra=lambda column, values: None,
    )
    means = per_function.nanmean(0).tolist()
    return {
        "eval/accuracy": (per_function[:, 0] >= 1).double().mean().item(),
        **{f"eval/rewards/{n}/mean": mean for n, mean in zip(rewards.names, means, strict=True) if mean == mean},
        "eval/mean_length": sum(len(rollout.ids) for rollout in rollouts) / len(rollouts),
        "eval/time": time.perf_counter() - started,
    }
