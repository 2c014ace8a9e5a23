"""The results of a run: curves.png, summary.json, and a printed table."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastgrpo.run.folder import RunFolder
from fastgrpo.run.metrics import metrics_of

WINDOW = 10  # the moving average is over this many lines of metrics.jsonl


@dataclass(frozen=True)
class Panel:
    """One diagram of curves.png. Training metrics are drawn faintly, with a moving average."""

    title: str
    unit: str  # the label of the vertical axis
    metrics: tuple[str, ...]  # evaluation metrics (eval/...) have no moving average
    labels: tuple[str, ...] = ()  # their names in the legend; empty uses the metrics' own names
    window: int = WINDOW  # logged steps of the moving average; 1 draws only the values
    dashed: tuple[str, ...] = ()  # evaluation metrics to compare with, in the colors of `metrics`
    command: str = ""  # on the page, only runs of this command show the curves


# The panels of tasks without their own.
PANELS = (
    Panel("Reward", "mean total reward", ("reward",)),
    Panel("Accuracy", "share correct", ("accuracy", "eval/accuracy"), ("accuracy", "held-out, greedy")),
    Panel("KL to the reference", "nats per token", ("kl",)),
    Panel("Clipped tokens", "share", ("clip_ratio/low_mean", "clip_ratio/high_mean")),
    Panel("Completion length", "tokens", ("completions/mean_length",)),
    Panel("Entropy", "nats per token", ("entropy",)),
    Panel("Advantage magnitude", "mean absolute advantage", ("advantage/abs_mean",)),
    Panel("Informative groups", "share of groups whose rewards differ", ("frac_informative",)),
)
# The panels of supervised training.
SUPERVISED_PANELS = (
    Panel("Loss", "nats per token", ("loss", "eval/loss"), ("training", "held-out"), command="sft"),
    Panel("Accuracy", "share correct", ("eval/accuracy",), ("held-out, greedy",)),
    Panel("Gradient norm", "before clipping", ("grad_norm",)),
    Panel("Learning rate", "of AdamW", ("learning_rate",), window=1),
)


def read_metrics(run_dir: str | Path, say: Callable[[str], None] = print) -> dict[str, tuple[list[int], list[float]]]:
    """Read metrics.jsonl as one series per metric. Skip unreadable lines with a warning."""
    path, series, damaged = Path(run_dir) / "metrics.jsonl", {}, []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        row = metrics_of(line)
        if row is None:
            damaged.append(number)
            continue
        step = row.pop("step")
        for name, value in row.items():
            if value is not None and math.isfinite(value):
                steps, values = series.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    if damaged:
        say(f"warning: {path}:{damaged[0]} holds no metrics; {len(damaged)} such lines are skipped")
    return series


def moving_average(values: list[float], window: int = WINDOW) -> list[float]:
    """Average each value with up to `window` - 1 values before it."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def with_named(panel: Panel, names: Iterable[str]) -> Panel:
    """Add the metrics of held-out data sets with names, such as eval_easy/accuracy beside eval/accuracy."""
    found = {}
    for metric, label in zip(panel.metrics, panel.labels or panel.metrics, strict=True):
        found[metric] = label
        for name in names if metric.startswith("eval/") else ():
            prefix, _, rest = name.partition("/")
            if prefix.startswith("eval_") and f"eval/{rest}" == metric:
                found[name] = f"{label}, {prefix.removeprefix('eval_')}"
    return replace(panel, metrics=tuple(found), labels=tuple(found.values()))


def is_measured(panel: Panel, series: Mapping[str, Any]) -> bool:
    """Return whether a run has curves of a panel. Clip ratios that are always 0 count as no curve."""
    curves = {name: series[name][1] for name in panel.metrics if name in series}
    return any(any(values) if name.startswith("clip_ratio/") else values for name, values in curves.items())


def draw_curves(run_dir: str | Path, say: Callable[[str], None] = print, panels: Sequence[Panel] = PANELS) -> Path:
    """Plot the curves of a run to curves.png, in two rows, without empty panels."""
    from matplotlib.figure import Figure

    series = read_metrics(run_dir, say)
    panels = [panel for panel in (with_named(panel, series) for panel in panels) if is_measured(panel, series)]
    columns = max(1, math.ceil(len(panels) / 2))
    figure = Figure(figsize=(4 * columns, 7.5), layout="constrained")
    windows = sorted({panel.window for panel in panels if panel.window > 1})
    averages = f"moving average over {' or '.join(map(str, windows))} logged steps"
    figure.suptitle(f"{Path(run_dir).resolve().name}: {averages}")
    for place, panel in enumerate(panels, 1):
        axis = figure.add_subplot(2, columns, place)
        for i, (name, label) in enumerate(zip(panel.metrics, panel.labels or panel.metrics, strict=True)):
            color, (steps, values) = f"C{i}", series.get(name, ([], []))
            if not values:
                continue
            # Later curves have gaps, so that they hide no earlier one. With `dashed` metrics, only these are dashed.
            style = "-" if panel.dashed else ("-", "--", ":", "-.")[i % 4]
            if name.startswith(("eval/", "eval_")):
                axis.plot(steps, values, style, marker="o", color=color, label=label)
                continue
            if panel.window > 1:
                axis.plot(steps, values, color=color, alpha=0.25)
            marker = "o" if len(values) == 1 else None  # a line of one point is invisible
            axis.plot(steps, moving_average(values, panel.window), style, marker=marker, color=color, label=label)
        for i, name in enumerate(panel.dashed):
            if name in series:
                axis.plot(*series[name], "--", color=f"C{i}")
        if len(panel.metrics) > 1:  # below the axis, where it covers no curve
            side_by_side = max(1, 36 // (4 + max(map(len, panel.labels or panel.metrics))))
            axis.legend(
                fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=side_by_side, frameon=False
            )
        axis.set(title=panel.title, xlabel="step", ylabel=panel.unit)
        axis.grid(alpha=0.3)
    path = Path(run_dir) / "curves.png"
    if path.is_dir():
        raise ValueError(f"{path} is a folder, but the picture needs this name; move it away")
    figure.savefig(path, dpi=100)
    return path


def conclude(
    folder: RunFolder,
    summary: dict[str, Any],
    checkpoint: Path,
    say: Callable[[str], None],
    panels: Sequence[Panel] = PANELS,
) -> list[tuple[str, str]]:
    """Write summary.json and curves.png, and return the table. A failure to write is only a warning."""
    run_dir = folder.path
    text, written = json.dumps(summary, indent=2) + "\n", []
    for name, write in (
        ("summary.json", lambda path: path.write_text(text)),
        ("curves.png", lambda path: draw_curves(run_dir, say, panels)),
    ):
        try:
            write(folder.claim(name))
            written.append(name)
        except (ValueError, OSError) as error:
            say(f"warning: {name} is not written: {error}")
    optional = ("samples.jsonl", "merged", "trace.json.gz")
    # Supervised training generates no samples, so samples.jsonl is empty.
    files = [name for name in optional if (run_dir / name).exists() and (run_dir / name).stat().st_size]
    files = [checkpoint.name, "metrics.jsonl", *written, "config.json", *files]
    took = (
        ("steps", "steps", "{:,}".format),
        ("num_tokens", "tokens", "{:,}".format),
        ("wall_seconds", "time", duration),
        ("peak_memory_gib", "peak memory", "{:.2f} GiB".format),
    )
    shown = [(name, show(summary[key])) for key, name, show in took if key in summary]
    return [*_held_out(run_dir, panels), *shown, ("files", ", ".join(files))]


def _held_out(run_dir, panels):
    """Format held-out metrics before and after, with 95% intervals if measured."""
    try:
        rows, series = [], read_metrics(run_dir, say=lambda _: None)
    except OSError:  # already reported by `draw_curves`, like damaged lines
        return []
    first, names = Panel("", "", ("eval/accuracy", "eval/pass@1"), ("accuracy", "pass@1")), {}
    for panel in (with_named(panel, series) for panel in (first, *panels)):
        for name, label in zip(panel.metrics, panel.labels, strict=True):
            if name.startswith(("eval/", "eval_")):
                names.setdefault(name, f"{panel.title}: {label}" if panel.title else label)
    for name, label in names.items():
        steps, values = series.get(name, ([], []))
        if values:
            bounds = [series.get(f"{name}/ci95_{side}", ([], []))[1] for side in ("low", "high")]
            told = [f"{value:.3f}" for value in values]
            if all(len(side) == len(values) for side in bounds):
                told = [f"{text} [{low:.3f}, {high:.3f}]" for text, low, high in zip(told, *bounds, strict=True)]
                label += " [95%]"
            before = f"{told[0]} -> " if steps[0] == 0 and len(steps) > 1 else ""
            rows.append((label, before + told[-1]))
    return rows


def three_digits(value: float) -> str:
    """Format a number with three digits, and from 1,000 on without decimals."""
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e9 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def table(rows: list[tuple[str, Any]]) -> str:
    """Format names and values as aligned lines."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
