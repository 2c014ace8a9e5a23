"""python -m fastgrpo.distill MODEL: generate completions for the training prompts of a task, and keep the correct ones.

This is the rejection sampling of DeepSeek-R1 (arXiv 2501.12948, section 2.3.3): a base model then learns from correct
and readable completions of a policy that was trained with reinforcement learning.

Under torchrun, each rank loads the model and completes its share of the prompts. The number of ranks does not change
the kept completions. Only rank 0 writes them.
"""

import dataclasses
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastgrpo.config.command import new_file, parse_flags, quiet_libraries, run_command
from fastgrpo.config.recipe import take_flag, task_defaults
from fastgrpo.config.settings import DistillConfig, SelectionConfig
from fastgrpo.data.records import Sample, TrainerState
from fastgrpo.data.rows import Rows, as_rows
from fastgrpo.ranks import join
from fastgrpo.rewards.answers import completion_text
from fastgrpo.run.terminal import Terminal
from fastgrpo.tasks import find_task, needed_rewards

if TYPE_CHECKING:
    from fastgrpo.rewards.call import Rewards

# Reasons to drop a completion, in the order in which they are checked.
REASONS = (
    "unjudged", "wrong", "empty", "malformed", "wrong step", "truncated", "repetitive", "duplicate",
    "beyond max_per_prompt",
)  # fmt: skip
# End of a reward function's name -> reason to drop a completion that does not get its maximum.
REQUIRED = {"format_reward": "malformed", "steps_reward": "wrong step"}
CHUNK = 256  # prompts that are completed before their kept completions are written
DISTILLATION = """Generate completions for the training prompts of a task, and keep the correct ones.

A completion is correct if its first reward is at least 1. Correct completions are kept if they get the maximum of each
reward function whose name ends in format_reward or steps_reward. Truncated, repetitive and duplicate completions are
dropped. Without --reward_funcs, the task's steps_reward (if it has one) also checks the steps of the solution.
`python -m fastgrpo.sft --task TASK --train_file FILE` trains on the file."""


def parse(argv: list[str]) -> DistillConfig:
    """Read the command line. The recipe of the task overrides the default of max_completion_length."""
    argv, task = take_flag(argv, "--task")
    task = "arithmetic" if task is None else task
    recipe = {name: value for name, value in task_defaults(task).items() if name == "max_completion_length"}
    defaults = {**recipe, "task": task}
    return parse_flags(
        DistillConfig, argv, prog="python -m fastgrpo.distill", description=DISTILLATION, defaults=defaults
    )


def distill(argv: list[str]) -> None:
    """Draw, judge and select completions, and print how many were kept."""
    config = parse(argv)
    from fastgrpo.evaluation.heldout import load_sampler
    from fastgrpo.policy.fit import prompts_of
    from fastgrpo.policy.load import load_tokenizer
    from fastgrpo.rewards.call import Rewards, judge_together, rewards_settings
    from fastgrpo.rollout.backend import draw_groups
    from fastgrpo.tools.prompts import Prompts

    quiet_libraries()
    ranks = join(config.device)
    tokenizer = load_tokenizer(config.model, config.trust_remote_code)
    task = find_task(config.task).build(config, tokenizer)
    if task.tools or task.environment:
        raise ValueError(f"task {config.task} has tools, and fastgrpo.distill calls none")
    checks = [] if task.steps_reward is None or config.reward_funcs else [task.steps_reward]
    rewards = Rewards([*needed_rewards(task, config), *checks], **rewards_settings(config, len(checks)))
    train = task.train()
    endless = len(train) > len(train.rows)  # it makes its rows; `rows` are only the first ones
    rows = train.take(config.max_prompts or len(train)) if endless else train.rows
    rows = chosen_rows(as_rows(rows, f"train of task {config.task}"), config)
    policy, engine, sampling = load_sampler(config.model, tokenizer, config, top_p=config.top_p, top_k=config.top_k)
    rewards.columns = rows.columns
    rewards.place(rewards.device(policy.device, config.reward_device), tokenizer)
    source = Prompts(tokenizer, config.template_kwargs)
    prompts = list(prompts_of(rows, source, policy, config.max_completion_length))
    state = TrainerState(0, 1, 0.0, config.max_completion_length)
    drawn, kept, dropped = len(prompts) * config.num_generations, 0, Counter()
    output, terminal = config.output if ranks.lead else None, Terminal(quiet=config.quiet, silent=not ranks.lead)
    with rewards, new_file(output, whole=True) as file, terminal.share("distill") as progress:
        for start in range(0, len(prompts), CHUNK):
            chunk = prompts[start : start + CHUNK]
            share = len(chunk) / len(prompts)
            mine = {i: chunk[i] for i in range(ranks.rank, len(chunk), ranks.size)}
            groups = draw_groups(
                engine, source.start(mine, config.num_generations),
                dataclasses.replace(sampling, seed=config.seed + start),
                progress=lambda done, share=share: progress(done * share), ranks=ranks,
            )  # fmt: skip
            judged = judge_together(rewards, groups, chunk, tokenizer, state, ranks=ranks)
            selected, left_out = select(judged.completions, rewards, config)
            for completion, reward in selected:
                file.write(_line(completion, reward))
            file.flush()
            kept, dropped = kept + len(selected), dropped + left_out
        counts = [(reason, f"{dropped[reason]:,}") for reason in REASONS if dropped[reason]]
        if not kept:  # on every rank
            told = ", ".join(f"{count} {reason}" for reason, count in counts)
            remedy = "raise num_generations, or distill a policy that solves more of these prompts"
            if dropped["malformed"]:
                remedy += "; if the maximum of a format reward is not 1, set its attribute full_mark to the maximum"
            raise ValueError(f"none of {drawn:,} completions is kept ({told}); {remedy}")
    terminal.table([("prompts", f"{len(prompts):,}"), ("drawn", f"{drawn:,}"), *counts, ("kept", f"{kept:,}")])
    terminal.last(f"kept completions {config.output}")


def chosen_rows(rows: Rows, config: DistillConfig) -> Rows:
    """Choose the rows to complete: each prompt once, at most max_prompts in all."""
    first = {json.dumps(row.get("prompt"), default=repr): index for index, row in reversed(list(enumerate(rows)))}
    indices = sorted(first.values())
    if config.max_prompts is not None and config.max_prompts < len(indices):
        indices = sorted(random.Random(config.seed).sample(indices, config.max_prompts))
    return Rows([rows[index] for index in indices], lambda n: rows.where(indices[n]))


def repetition(ids: Sequence[int], length: int) -> float:
    """Measure repetition = 1 - (distinct n-grams of `length` tokens) / (n-grams of `length` tokens)."""
    runs = [tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def select(
    completions: Sequence[Sample], rewards: "Rewards", config: SelectionConfig
) -> tuple[list[tuple[Sample, float]], Counter]:
    """Select the completions to keep, at most max_per_prompt per prompt.

    A kept completion is right by the first reward function, has text, and gets the full mark of each function in
    `REQUIRED`. It is not truncated, not repetitive and no duplicate. Beyond max_per_prompt, the highest reward wins,
    then the earlier completion.
    """
    from fastgrpo.evaluation.heldout import full_mark
    from fastgrpo.rewards.call import reward_matrix

    totals = rewards.total(reward_matrix(completions)).tolist()
    required = [
        (name, full_mark(function), reason)
        for end, reason in REQUIRED.items()
        for function, name in zip(rewards.functions, rewards.names, strict=True)
        if name.endswith(end)
    ]
    dropped, kept, seen = Counter(), {}, set()
    for completion, total in zip(completions, totals, strict=True):
        prompt = json.dumps(completion.prompt)
        key = (prompt, json.dumps(completion.content))
        reason = _reason(completion, required, config)
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


def _reason(completion, required: list[tuple[str, Callable, str]], config):
    """Return the reason to drop a completion, or None."""
    right = next(iter(completion.rewards.values()))
    if math.isnan(right):  # None, a failure or a timeout
        return "unjudged"
    if right < 1:
        return "wrong"
    if not completion_text(completion.content):
        return "empty"
    for name, reached, reason in required:
        if not reached(completion.rewards[name]):
            return reason
    if completion.truncated:
        return "truncated"
    if repetition(completion.ids, config.repetition_n_grams) > config.max_repetition:
        return "repetitive"
    return None


def _line(completion, reward):
    """Format a kept completion as a row for supervised training."""
    rewards = {name: None if math.isnan(value) else value for name, value in completion.rewards.items()}
    row = {"prompt": completion.prompt, "completion": completion.content, "reward": reward, "rewards": rewards}
    return json.dumps(row, ensure_ascii=False) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    return run_command(distill, argv)


if __name__ == "__main__":
    sys.exit(main())
