"""Evaluation on held-out prompts, with the rollout and rewards of training.

One greedy completion per prompt gives the accuracy, and K sampled completions give pass@k and maj@k. With only one
prompt, its sampled completions give the accuracy. The format rate is the share of completions that get the full mark of
the function named ...format_reward (its `full_mark`, or 1.0). Every mean has a 95% interval, see estimators.py.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fastgrpo.data.prompts import shortened, transcript
from fastgrpo.data.records import Sample, TrainerState
from fastgrpo.evaluation.estimators import bootstrap, maj_at_k, pass_at_k, wilson
from fastgrpo.policy.fit import prompts_of
from fastgrpo.policy.load import OWN_ATTENTION, load_policy, stop_token_ids
from fastgrpo.policy.model import Policy
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rewards.answers import completion_text, final_answer
from fastgrpo.rewards.call import Judged, Rewards, joined, judge_together, reward_matrix
from fastgrpo.rollout import make_backend
from fastgrpo.rollout.backend import RolloutBackend, draw_groups
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.run.metrics import mean_given
from fastgrpo.tools.prompts import Prompts

HELD_OUT = -1  # the step in the seeds of environments


def load_sampler(
    path: str, tokenizer: PreTrainedTokenizerBase, config: Any, **filters: Any
) -> tuple[Policy, RolloutBackend, SamplingParams]:
    """Load the model of a command, its engine, and its sampling parameters."""
    policy, _ = load_policy(
        path, dtype=config.dtype, device=config.device, tokenizer=tokenizer,
        trust_remote_code=config.trust_remote_code, own_attention=OWN_ATTENTION[config.rollout_backend],
        load_in_4bit=config.load_in_4bit,
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=config.temperature, max_tokens=config.max_completion_length, seed=config.seed,
        stop_token_ids=stop_token_ids(policy, tokenizer), **filters,
    )  # fmt: skip
    return policy, make_backend(policy, config), sampling


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation.

    Attributes:
        values: Metrics by name: those of `METRICS` that start with eval/.
        intervals: The 95% interval (low, high) of metrics that are means over prompts.
        rows: One dict per completion.
        notes: Texts that help to interpret the values.
        warnings: Texts about completions that could not be judged.
        samples: The judged completions: the sampled ones, or the greedy ones if none were sampled.
    """

    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    rows: list[dict]
    notes: list[str]
    warnings: list[str]
    samples: Sequence[Sample] = ()

    def metrics(self) -> dict[str, float]:
        """Return values and intervals as one dict, for metrics.jsonl."""
        bounds = {}
        for name, (low, high) in self.intervals.items():
            bounds |= {f"{name}/ci95_low": low, f"{name}/ci95_high": high}
        return self.values | bounds

    def summary(self, told: set[str] | None = None) -> str:
        """Return a line with accuracy, pass@1, and pass@k and maj@k of the largest k, and a line per note.

        Skip notes in `told`, and add new ones to it, so that a run prints each note once.
        """
        told = set() if told is None else told
        notes = [note for note in self.notes if note not in told]
        told.update(notes)
        prompts = sum(row["draw"] == "greedy" for row in self.rows)
        by_kind = {name.partition("@")[0]: name for name in self.values if "@" in name}  # the last k of each
        shown = dict.fromkeys(["eval/accuracy", *(["eval/pass@1"] if by_kind else []), *by_kind.values()])
        means = ", ".join(f"{name.removeprefix('eval/')} {self.cell(name)}" for name in shown)
        prompts = f"{prompts} prompt{'s' * (prompts != 1)}"
        return "\n".join([f"{means} ({prompts}, {self.values['eval/time']:.1f} s)", *notes])

    def cell(self, name: str) -> str:
        """Format a value with its interval.

        Args:
            name: The metric.

        Returns:
            The text; empty if the metric was not measured.
        """
        if name not in self.values:
            return ""
        bounds = self.intervals.get(name)
        return f"{self.values[name]:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


def evaluate(
    engine: RolloutBackend,
    source: Prompts,
    rows: Sequence[dict],
    rewards: Rewards,
    sampling: SamplingParams,
    trainer_state: TrainerState,
    progress: Callable[[float], object] | None = None,
    num_generations: int = 0,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Complete each held-out row greedily once, and num_generations times by sampling; judge all completions.

    Args:
        engine: An idle rollout backend.
        source: Makes the prompts of rows.
        rows: Data rows.
        rewards: The reward functions; the first defines the accuracy.
        sampling: Sampling parameters. Greedy completions use its max_tokens and stop_token_ids too.
        trainer_state: Passed to the reward functions.
        progress: A function that gets the share of the work just done, or None. The shares sum to 1; every completion
            counts the same.
        num_generations: Number of sampled completions per prompt, in addition to the greedy one, from 0 to 1000.
        ranks: The ranks; each completes and judges a share of the rows.

    Returns:
        The results, equal on all ranks.

    Raises:
        ValueError: A row is wrong (the message has its place), or a reward function fails.
    """
    started = time.perf_counter()
    prompts = list(prompts_of(rows, source, engine.policy, sampling.max_tokens))
    mine = {i: prompts[i] for i in range(ranks.rank, len(prompts), ranks.size)}
    means = _Means()

    def judged(sampling: SamplingParams, draws: int, prefix: str) -> list[Sample]:
        parts, size = [], max(1, len(prompts))
        if source.environments is not None and source.environments.resets:  # each completion in flight has its own
            size = max(1, engine.max_num_seqs // draws) * ranks.size
        for at in range(0, len(prompts), size):
            some = {i: prompt for i, prompt in mine.items() if at <= i < at + size}
            share = draws / (1 + num_generations) * min(size, len(prompts) - at) / len(prompts)
            told = None if progress is None else lambda done, share=share: progress(done * share)
            groups = source.start(some, draws, HELD_OUT)
            with engine.policy.gather():
                drawn = draw_groups(engine, groups, sampling, progress=told, ranks=ranks)
            parts.append(judge_together(rewards, drawn, prompts, source.tokenizer, trainer_state, ranks=ranks))
            source.finish(groups)
        result = joined(parts)
        _measure(result, rewards, draws, prefix, means)
        return result.completions

    drawn = greedy = judged(dataclasses.replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0), 1, "eval/")
    shown = [_row(i, "greedy", completion) for i, completion in enumerate(greedy)]
    if num_generations:
        drawn = judged(sampling, num_generations, "eval/sampled/")
        _add_estimates(drawn, num_generations, means)
        shown += [_row(*divmod(i, num_generations), completion) for i, completion in enumerate(drawn)]
    counted = drawn if len(rows) == 1 else greedy  # one greedy completion is an accuracy of 0 or 1
    means.add("eval/accuracy", [float(_right(completion)) for completion in counted], share=True)
    means.values["eval/time"] = time.perf_counter() - started
    return Evaluation(means.values, means.intervals, shown, means.notes, means.warnings, drawn)


def _add_estimates(completions, draws, means):
    """Add pass@k and maj@k of the draws of each problem, which are consecutive."""
    right = [_right(completion) for completion in completions]
    answers = [final_answer(completion_text(completion.content)) for completion in completions]
    voting = not any(r and answer is None for r, answer in zip(right, answers, strict=True))
    if not voting:
        means.notes.append("note: maj@k is left out: right completions have no number or marked answer as their vote")
    spans = [slice(i, i + draws) for i in range(0, len(completions), draws)]
    for k in draws_reported(draws):
        means.add(f"eval/pass@{k}", [pass_at_k(draws, sum(right[span]), k) for span in spans], share=True)
        if k > 1 and voting:
            means.add(f"eval/maj@{k}", [maj_at_k(answers[span], right[span], k) for span in spans], share=True)


def draws_reported(count: int) -> list[int]:
    """Return the k of pass@k and maj@k: powers of two up to the number of draws, and that number.

    Args:
        count: The number of draws.

    Returns:
        The ks in rising order.
    """
    return sorted({2**i for i in range(count.bit_length()) if 2**i <= count} | {count})


class _Means:
    """Collects means over problems and their intervals by name, and notes and warnings about them."""

    def __init__(self):
        self.values, self.intervals, self.notes, self.warnings = {}, {}, [], []

    def add(self, name, by_problem, share=False):
        """Add a mean of one value per problem; NaN means no value.

        A `share` of zeros and ones gets Wilson's interval, any other mean the bootstrap's, and a single value none.
        """
        given = [value for value in by_problem if value == value]
        if not given:
            return
        self.values[name] = sum(given) / len(given)
        if len(given) > 1:
            counted = share and set(given) <= {0.0, 1.0}
            self.intervals[name] = wilson(sum(given), len(given)) if counted else bootstrap(given)


def _right(completion):
    """Return whether the first reward is at least 1; None is not."""
    return next(iter(completion.rewards.values())) >= 1


def _measure(judged: Judged, rewards, draws, prefix, means):
    """Add rewards, format rate, lengths, truncations and logged metrics under `prefix`. Failures become warnings."""
    completions, per_function = judged.completions, reward_matrix(judged.completions)
    for name, count in judged.errors.items():
        means.values[f"{prefix}rewards/{name}/errors"] = count
        means.warnings.append(
            f"warning: reward function {name!r} failed on {count} of {len(completions)} held-out completions, which "
            "count as wrong and get no reward from it"
        )
    for name, count in judged.timeouts.items():
        means.values[f"{prefix}rewards/{name}/timeouts"] = count
        means.warnings.append(
            f"warning: reward function {name!r} took too long for {count} of {len(completions)} held-out completions, "
            "which count as wrong and get no reward from it"
        )
    columns = {"reward": rewards.total(per_function)}
    columns |= {f"rewards/{name}/mean": column for name, column in zip(rewards.names, per_function.T, strict=True)}
    shares = {}
    for function, name, column in zip(rewards.functions, rewards.names, per_function.T, strict=True):
        if name.endswith("format_reward"):
            shares["format_rate"] = full_mark(function)(column).double()
    lengths = [len(completion.drawn) for completion in completions]
    columns["mean_length"] = torch.tensor(lengths, dtype=torch.float64)
    truncated = [completion.truncated for completion in completions]
    shares["clipped_ratio"] = torch.tensor(truncated, dtype=torch.float64)
    for name, column in (columns | shares).items():
        by_problem = column.view(-1, draws).nanmean(1).tolist()
        means.add(prefix + name, by_problem, share=name in shares)
    for name, values in judged.logged.items():  # no interval: the problem of a value is unknown
        means.values[f"{prefix}{name}"] = mean_given(values)


def full_mark(function: Callable) -> Callable[[float | torch.Tensor], bool | torch.Tensor]:
    """Return a test for the full mark of a format reward: the function's `full_mark`, or 1.0.

    Args:
        function: The reward function.

    Returns:
        A function that returns whether a reward, or each reward of a tensor, is full.
    """
    mark = getattr(function, "full_mark", 1.0)
    return lambda reward: reward >= mark - 1e-9  # the reward may be a sum of tenths, which rounds


def _row(problem, draw, completion):
    """Return one completion as a line of the output file."""
    return {
        "problem": problem,
        "draw": draw,
        "prompt": completion.prompt,
        "completion": completion.content,
        "right": _right(completion),
        "rewards": {name: None if math.isnan(value) else value for name, value in completion.rewards.items()},
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.drawn),
        **({} if completion.dialogue is None else {"calls": completion.dialogue.calls}),
    }


def comparison(models: Sequence[str], results: Sequence[Evaluation]) -> list[list[str]]:
    """Format the results of several models as a table, with 95% intervals in brackets.

    Args:
        models: The name of each model.
        results: The results of each model.

    Returns:
        The cells by line, titles first: a line per metric, a column per model.
    """
    names = dict.fromkeys(name for result in results for name in result.values)
    names = sorted(names, key=lambda name: ("accuracy" not in name, "@" not in name))  # the most quoted ones come first
    units = {"eval/time": " (s)"}
    lines = [
        [name.removeprefix("eval/") + units.get(name, ""), *(result.cell(name) for result in results)] for name in names
    ]
    return [["metric", *models], *lines]


def beside(models: Sequence[str], results: Sequence[Evaluation], count: int) -> list[list[str]]:
    """Format the first completions of several models as a table.

    Args:
        models: The name of each model.
        results: The results of each model on the same prompts.
        count: Number of completions per model. The first sample of each prompt comes first; greedy ones come last.

    Returns:
        The cells by line, titles first: a line per prompt and draw, a column per model.
    """

    def place(row):
        return math.inf if row["draw"] == "greedy" else row["draw"], row["problem"]

    def cell(row):
        text = transcript(row["completion"]) if row.get("calls") else completion_text(row["completion"])
        return f"{'right' if row['right'] else 'wrong'}: {text}"

    lines = itertools.islice(zip(*(sorted(result.rows, key=place) for result in results), strict=True), count)
    cells = [[shortened(line[0]["prompt"]), str(line[0]["draw"]), *map(cell, line)] for line in lines]
    return [["prompt", "draw", *models], *cells]
