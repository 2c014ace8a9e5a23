"""Makes the content of the page from the records of its runs, as a dict for JSON.

The curves of a run share their axes; `at` holds the positions of a curve's points. The key of a metric is its name.
"""

import bisect
import dataclasses
import datetime
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fastgrpo.page.reading import Run, finite
from fastgrpo.page.samples import read_samples, short, text_of, usable
from fastgrpo.run.curves import PANELS, Panel, is_measured, three_digits, with_named
from fastgrpo.run.metrics import meaning

SAMPLES_BYTES = 6_000_000  # samples of all runs: the page stays below 12 MB, with 2 MB of plotly
POINTS = 2000  # maximum per curve; a chart is narrower
FEWEST = 250  # minimum per curve on a page of many runs
WARNINGS = 500  # maximum per run, the first ones
ENDS = 10  # logged steps at the beginning and at the end of training, which a figure averages
ALWAYS = ("completions/mean_length", "frac_informative")  # shown for every run, if measured
# Colors for any kind of color vision, on light and dark backgrounds.
COLORS = (
    "#3b82d6", "#e0762a", "#2f9e63", "#c94f9b", "#8f6ed5", "#b8891d", "#1f9fb0", "#d1495b", "#7a8791", "#8c6d4f",
)  # fmt: skip


def payload(runs: Sequence[Run], panels: Sequence[Panel]) -> dict[str, Any]:
    """Make the content of a page."""
    points = max(FEWEST, min(POINTS, 2 * POINTS // len(runs)))
    names = dict.fromkeys(name for run in runs for name in run.series)
    return {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        "made": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        "panels": [
            dataclasses.asdict(panel)
            for panel in (with_named(panel, names) for panel in [*panels, *_missing(panels)])
            if any(is_measured(panel, run.series) for run in runs)
        ],
        "metrics": {name: meaning(name) for name in names},
        "runs": [_run(run, _color(place), points, SAMPLES_BYTES // len(runs)) for place, run in enumerate(runs)],
    }


def _missing(panels):
    """Return the usual panels that a task's own panels lack."""
    shown = {metric for panel in panels for metric in panel.metrics}
    return [panel for panel in PANELS if set(panel.metrics) & set(ALWAYS) - shown]


def _color(place):
    """The color of a run. Runs after the first ten have darker colors, those after the next ten brighter ones."""
    turn, color = divmod(place, len(COLORS))
    parts = [min(255, round(part * (1, 0.6, 1.35)[turn % 3])) for part in bytes.fromhex(COLORS[color][1:])]
    return f"#{bytes(parts).hex()}"


def _run(run, color, points, budget):
    axes, series, note = _curves(run, points)
    shown, more = run.warnings[:WARNINGS], len(run.warnings) - WARNINGS
    weights = usable(run.config.get("reward_weights"))
    samples, rewards = read_samples(run.folder, budget, weights)
    if run.config.get("command") == "sft":
        samples["note"] = "Supervised training generates no completions."
    if more > 0:
        shown = [*shown, {"step": run.warnings[-1]["step"], "text": f"{more:,} more warnings are in warnings.jsonl"}]
    return {
        "name": run.name,
        "color": color,
        "folder": str(run.folder),
        "headline": headline(run),
        "about": about(run),
        "axes": axes,
        "series": series,
        "note": note,
        "warnings": shown,
        "weights": weights,
        "settings": {name: text_of(value) for name, value in run.config.items()},
        "finished": run.finished,
        "rewards": rewards,
        "samples": samples,
    }


def _curves(run, points):
    """Thin the curves of a run. Returns axes, curves, and a note if any was thinned."""
    kept = {name: kept_of(values, points) for name, (_, values) in run.series.items()}
    # Keep the same steps for curves that a chart combines: the stages of a step, and a metric with its interval.
    for name in kept:
        whole = "step_time" if name.startswith("time/") else re.sub("/ci95_(low|high)$", "", name)
        if whole in kept and run.series[whole][0] == run.series[name][0]:
            kept[name] = kept[whole]
    steps = sorted({run.series[name][0][place] for name, places in kept.items() for place in places})
    place_of = {step: place for place, step in enumerate(steps)}
    series, thinned = {}, 0
    for name, (at, values) in run.series.items():
        series[name] = {
            "at": [place_of[at[place]] for place in kept[name]],
            "value": [short(values[place]) for place in kept[name]],
        }
        if len(values) > points:
            thinned += 1
            means, lines = stretches_of(values, kept[name])
            series[name] |= {"mean": [short(mean) for mean in means], "lines": lines}
    note = (
        f"{run.name}: {thinned} curves are drawn with at most {points:,} points. The smallest and the largest value of "
        "each interval are kept, and the moving average uses all values."
    )
    return _axes(run, steps), series, note if thinned else ""


def _axes(run, steps):
    """Return tokens and seconds at each step, from the last line that has them."""
    seconds = cumulative_seconds(run)
    tokens = run.series.get("num_tokens", ([], []))
    known = {"tokens": tokens, "seconds": (list(seconds), list(seconds.values()))}
    axes = {"step": steps}
    for name, (at, values) in known.items():
        places = [bisect.bisect_right(at, step) for step in steps] if values else []
        axes[name] = [short(values[place - 1], 9) if place else 0 for place in places]
    return axes


def kept_of(values: Sequence[float], points: int = POINTS) -> list[int]:
    """Choose the points of a curve to keep: minimum and maximum of buckets of equal length."""
    if len(values) <= points:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for low, high in _buckets(len(values), points):
        kept.add(min(range(low, high), key=values.__getitem__))
        kept.add(max(range(low, high), key=values.__getitem__))
    return sorted(kept)


def stretches_of(values: Sequence[float], kept: Sequence[int]) -> tuple[list[float], list[int]]:
    """Average the values after the previous kept point, up to each kept point."""
    spans = [(before + 1, place + 1) for before, place in pairwise([-1, *kept])]
    return [sum(values[low:high]) / (high - low) for low, high in spans], [high - low for low, high in spans]


def _buckets(count, points):
    """Split `count` positions into buckets of two kept points each, and the two ends of the curve."""
    number = points // 2 - 1
    return [(i * count // number, (i + 1) * count // number) for i in range(number)]


def headline(run: Run) -> list[dict[str, str]]:
    """Return the main figures of a run."""
    steps, planned = run.last_step, run.config.get("max_steps")
    state = "finished" if run.finished else "not finished: still running, or stopped"
    if not run.finished and isinstance(planned, int) and planned >= steps > 0:
        state = f"of {planned:,}; {state}"
    told = ("accuracy", "pass@1", "loss") if run.config.get("command") == "sft" else ("accuracy", "pass@1")
    held_out = Panel("", "", tuple(f"eval/{name}" for name in told), tuple(f"Held-out {name}" for name in told))
    held_out = with_named(held_out, run.series)
    rows = [
        *(_held_out(run, *pair) for pair in zip(held_out.metrics, held_out.labels, strict=True)),
        _trained(run, "reward", "Reward in training"),
        ("Steps", f"{steps:,}", state),
        _tokens(run),
        _seconds(run, steps),
        _memory(run),
    ]
    return [dict(zip(("label", "value", "detail"), row, strict=True)) for row in rows if row]


def about(run: Run) -> list[dict[str, str]]:
    """Describe a run: model, data, method and versions."""
    config, names = run.config, {"train": "GRPO", "sft": "supervised training"}
    command = config.get("command")
    command_line = "dataset_name" in config  # a run made in Python has the default of `task`, and uses none
    model = config.get("model_name_or_path") or ("the task's own small model" if command_line else None)
    training = names.get(command, command)
    if command == "train" and config.get("loss_type"):
        training = f"GRPO with the loss {config['loss_type']}"
    rows = {
        "task": config.get("task") if command_line else None,
        "data": config.get("dataset_name"),
        "model": model,
        "training": training,
        "rewards": _listed(config.get("reward_funcs")),
        "seed": config.get("seed"),
        **{name: config.get(name) for name in ("device", "dtype") if config.get(name) != "auto"},
        "versions": ", ".join(run.versions),
    }
    return [{"label": label, "value": str(value)} for label, value in rows.items() if value not in (None, "")]


def _listed(values):
    return ", ".join(map(str, values)) if isinstance(values, list) else ""


def _held_out(run, metric, label):
    """Compare the first evaluation with the last, with 95% intervals if measured."""
    steps, values = run.series.get(metric, ([], []))
    if not values:
        return None
    first, last = _interval(run, metric, steps[0]), _interval(run, metric, steps[-1])
    first = first and f"95% interval: {first}"
    if len(values) == 1:
        return label, number(values[0]), " ".join(filter(None, (f"at step {steps[0]:,}", first)))
    parts = [first and f"{first} → {last}", "" if steps[0] == 0 else f"steps {steps[0]:,} and {steps[-1]:,}"]
    return label, f"{number(values[0])} → {number(values[-1])}", "; ".join(filter(None, parts))


def _interval(run, metric, step):
    ends = []
    for end in ("low", "high"):
        steps, values = run.series.get(f"{metric}/ci95_{end}", ([], []))
        ends += [value for at, value in zip(steps, values, strict=True) if at == step][-1:]
    return f"{ends[0]:.3f} to {ends[1]:.3f}" if len(ends) == 2 else ""


def _trained(run, metric, label):
    """Compare the first logged steps of training with the last ones."""
    values = run.series.get(metric, ([], []))[1]
    if not values:
        return None
    some = min(ENDS, max(1, len(values) // 5))
    first, last = sum(values[:some]) / some, sum(values[-some:]) / some
    return (
        label,
        f"{number(first)} → {number(last)}",
        f"means of the first and last {some} logged steps" if some > 1 else "first and last logged step",
    )


def _tokens(run):
    total = run.series.get("num_tokens", ([], []))[1]
    total = run.summary.get("num_tokens") if run.finished else total[-1] if total else None
    if finite(total) is None:
        return None
    for size, unit in ((1e9, " billion"), (1e6, " million")):
        if total >= size:
            return "Tokens", f"{three_digits(total / size)}{unit}", "prompts and completions"
    return "Tokens", f"{total:,.0f}", "prompts and completions"


def _seconds(run, steps):
    in_steps = finite(max(cumulative_seconds(run).values(), default=None))
    total = finite(run.summary.get("wall_seconds")) if run.finished else in_steps
    if total is None:
        return None
    without = "without evaluations and checkpoints"
    parts = [f"{duration(in_steps)} of it in training steps" if run.finished else without] if in_steps else []
    parts += [f"{three_digits(in_steps / steps)} s per step"] if in_steps and steps else []
    return "Time", duration(total), ", ".join(parts)


def _memory(run):
    measured = run.series.get("memory/peak_gib", ([], []))[1]
    peak = run.summary.get("peak_memory_gib") or max(measured, default=None)
    return ("Peak memory", f"{peak:.3g} GiB", "") if finite(peak) is not None else None


def cumulative_seconds(run: Run) -> dict[int, float]:
    """Sum the seconds of the steps, without evaluations and checkpoints."""
    seconds, total, before = {}, 0.0, 0
    for step, value in zip(*run.series.get("step_time", ([], [])), strict=True):
        total += value * max(step - before, 0)
        before, seconds[step] = max(step, before), total
    return seconds


def number(value: float) -> str:
    """Format a figure with three decimals, or three digits if it is far from 1."""
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 100 else three_digits(value)


def duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"
