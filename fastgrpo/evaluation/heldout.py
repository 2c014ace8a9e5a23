"""Held-out prompts through the same rollout and rewards as training, and what is measured on them.

One greedy completion of each prompt gives the accuracy; K draws of each give pass@k and maj@k besides. The format rate
is the share of completions to which a reward function named ...format_reward gives its full mark: its attribute
`full_mark`, 1.0 where it has none. Every mean has a 95% interval: see estimators.py.
"""

import dataclasses
import time
from dataclasses import dataclass

import torch

from fastgrpo.data.prompts import check_prompts, to_completion, to_prompt
from fastgrpo.evaluation.estimators import MAX_DRAWS, bootstrap, maj_at_k, pass_at_k, wilson
from fastgrpo.rewards.answers import completion_text, final_answer


@dataclass(frozen=True)
class Evaluation:
    """values: metrics by name. intervals: (low, high) of those that are means over prompts. rows: one a completion.
    notes: what a person must know to read them."""

    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    rows: list[dict]
    notes: list[str]

    def metrics(self):
        """Values and intervals as one dict, for metrics.jsonl."""
        bounds = {}
        for name, (low, high) in self.intervals.items():
            bounds |= {f"{name}/ci95_low": low, f"{name}/ci95_high": high}
        return self.values | bounds

    def summary(self):
        """Accuracy, and pass@k and maj@k of the most draws, on one line; a line for each note."""
        prompts = sum(row["draw"] == "greedy" for row in self.rows)
        by_kind = {name.partition("@")[0]: name for name in self.values if "@" in name}  # the last k of each
        shown = ["eval/accuracy", *by_kind.values()]
        means = ", ".join(f"{name.removeprefix('eval/')} {self.cell(name)}" for name in shown)
        return "\n".join([f"{means} ({prompts} prompts, {self.values['eval/time']:.1f} s)", *self.notes])

    def cell(self, name):
        """A value with its interval, as text."""
        if name not in self.values:
            return ""
        bounds = self.intervals.get(name)
        return f"{self.values[name]:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


def evaluate(engine, tokenizer, rows, rewards, sampling, trainer_state, progress=None, num_generations=0):
    """Complete `rows` greedily once, and by `num_generations` draws each, and score all.

    Args:
        engine: `RolloutEngine`. rows: data rows. rewards: `Rewards`; the first function is the accuracy. sampling: of
            the draws; max_tokens and stop_token_ids hold for the greedy ones too. trainer_state: handed to the reward
            functions. progress: as in `RolloutEngine.generate`.

    Returns:
        `Evaluation`; the names of its values are those of `METRICS` that begin with eval/.

    Raises:
        ValueError: a prompt that the model cannot hold, or a reward function that fails.
    """
    if num_generations > MAX_DRAWS:
        raise ValueError(f"eval_num_generations must be at most {MAX_DRAWS}, got {num_generations}")
    started = time.perf_counter()
    prompts = [to_prompt(row, tokenizer) for row in rows]
    check_prompts(prompts, engine.model, sampling.max_tokens)
    means = _Means()
    greedy = dataclasses.replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    shown, right = _complete(engine, tokenizer, prompts, rewards, greedy, trainer_state, progress, 1, "eval/", means)
    means.add("eval/accuracy", [float(r) for r in right], share=True)
    if num_generations:
        drawn, right = _complete(
            engine, tokenizer, prompts, rewards, sampling, trainer_state, progress, num_generations, "eval/sampled/",
            means,
        )  # fmt: skip
        groups = range(0, len(drawn), num_generations)
        answers = [final_answer(completion_text(row["completion"])) for row in drawn]
        voting = not any(r and answer is None for r, answer in zip(right, answers, strict=True))
        if not voting:
            means.notes.append(
                "note: maj@k is left out: right completions have no number or marked answer to vote with"
            )
        for k in draws_reported(num_generations):
            spans = [slice(i, i + num_generations) for i in groups]
            passed = [pass_at_k(num_generations, sum(right[span]), k) for span in spans]
            means.add(f"eval/pass@{k}", passed, share=True)
            if k > 1 and voting:
                votes = [maj_at_k(answers[span], right[span], k) for span in spans]
                means.add(f"eval/maj@{k}", votes, share=True)
        shown += drawn
    means.values["eval/time"] = time.perf_counter() - started
    return Evaluation(means.values, means.intervals, shown, means.notes)


def draws_reported(count):
    """The k of pass@k and maj@k: the powers of two up to `count`, and `count`."""
    return sorted({2**i for i in range(count.bit_length()) if 2**i <= count} | {count})


class _Means:
    """Means over problems and their intervals, by name; notes on them."""

    def __init__(self):
        self.values, self.intervals, self.notes = {}, {}, []

    def add(self, name, by_problem, share=False):
        """by_problem: one value a problem, NaN for none. share: they are shares, 0 or 1 for one completion each."""
        given = [value for value in by_problem if value == value]
        if not given:
            return
        self.values[name] = sum(given) / len(given)
        counted = share and set(given) <= {0.0, 1.0}
        self.intervals[name] = wilson(sum(given), len(given)) if counted else bootstrap(given)


def _complete(engine, tokenizer, prompts, rewards, sampling, state, progress, draws, prefix, means):
    """`draws` completions of each prompt, scored; their means are added under `prefix`.

    Returns:
        (rows, right), one a completion, those of a prompt side by side. A completion is right where the first reward
        function gives at least 1; one that it gives no verdict on is not.
    """
    rollouts = engine.generate([prompt.ids for prompt in prompts], draws, sampling, progress)
    prompts = [prompt for prompt in prompts for _ in range(draws)]
    completions = [to_completion(p, rollout.ids, tokenizer) for p, rollout in zip(prompts, rollouts, strict=True)]
    per_function = rewards(
        prompts,
        completions,
        [rollout.ids for rollout in rollouts],
        trainer_state=state,
        log_metric=lambda name, value: None,
        log_extra=lambda column, values: None,
    )
    for name, count in rewards.errors.items():
        means.values[f"{prefix}rewards/{name}/errors"] = count
        means.notes.append(
            f"warning: reward function {name!r} failed on {count} of {len(completions)} held-out completions; they "
            "count as without a reward, and not as right"
        )
    columns = {f"rewards/{name}/mean": column for name, column in zip(rewards.names, per_function.T, strict=True)}
    shares = {}
    for function, name, column in zip(rewards.functions, rewards.names, per_function.T, strict=True):
        if name.endswith("format_reward"):
            # fp64 sums of tenths: a mark is full within rounding.
            shares["format_rate"] = (column >= getattr(function, "full_mark", 1.0) - 1e-9).double()
    columns["mean_length"] = torch.tensor([len(rollout.ids) for rollout in rollouts], dtype=torch.float64)
    shares["clipped_ratio"] = torch.tensor([rollout.truncated for rollout in rollouts], dtype=torch.float64)
    for name, column in (columns | shares).items():
        by_problem = column.view(-1, draws).nanmean(1).tolist()
        means.add(prefix + name, by_problem, share=name in shares)
    right = (per_function[:, 0] >= 1).tolist()
    rows = [
        {
            "problem": i // draws,
            "draw": i % draws if sampling.temperature else "greedy",
            "prompt": prompts[i].prompt,
            "completion": completions[i],
            "right": right[i],
            "rewards": {n: None if v != v else v for n, v in zip(rewards.names, per_function[i].tolist(), strict=True)},
            "finish_reason": rollout.finish_reason,
            "tokens": len(rollout.ids),
        }
        for i, rollout in enumerate(rollouts)
    ]
    return rows, right


def comparison(models, results):
    """Markdown: a row for each metric, a column for each model; 95% intervals in brackets."""
    names = dict.fromkeys(name for result in results for name in result.values)
    names = sorted(names, key=lambda name: not ("accuracy" in name or "@" in name))  # what people quote comes first
    lines = [["metric", *models], ["---"] * (len(models) + 1)]
    lines += [[name.removeprefix("eval/"), *(result.cell(name) for result in results)] for name in names]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
