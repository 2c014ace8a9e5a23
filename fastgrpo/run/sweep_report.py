"""The figures of a sweep: a line of CSV for each run, a table over the seeds, and a picture with bands."""

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastgrpo.config.sweep import SweepRun
from fastgrpo.run.curves import WINDOW, moving_average, read_metrics

FIGURES = ("accuracy_before", "accuracy_after", "reward", "steps", "num_tokens", "wall_seconds")
SUMMARY = tuple(name for name in FIGURES if name != "reward")  # those that summary.json has
SHOWN = {"accuracy_before": "accuracy before", "accuracy_after": "after", "reward": "reward", "wall_seconds": "seconds"}
PANELS = (
    # (title, label of the vertical axis, metric, the lines that its moving average is over)
    ("Reward in training", f"mean total reward, moving average over {WINDOW} logged steps", "reward", WINDOW),
    ("Accuracy on held-out prompts, greedy", "share right", "eval/accuracy", 1),
)


def figures_of(run: SweepRun, path: Path) -> dict[str, Any] | None:
    """Read the figures of a run that is done."""
    try:
        summary = json.loads((path / "summary.json").read_text())
        rewards = read_metrics(path, lambda text: None).get("reward", ([], []))[1][-WINDOW:]
    except (OSError, ValueError, RecursionError):
        return None
    if not (isinstance(summary, dict) and all(_is_figure(summary.get(name, "missing")) for name in SUMMARY)):
        return None
    measured = {**summary, "reward": statistics.mean(rewards) if rewards else None}
    return {
        "setting": run.setting,
        **vars(run.config),
        **{name: measured.get(name) for name in FIGURES},
        "folder": path.name,
    }


def _is_figure(value):
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def write_table(path: Path, swept: Sequence[str], figures: Sequence[dict[str, Any]]) -> None:
    """Write sweep.csv, with a line for each run."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*swept, *FIGURES, "folder"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(figures)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of some values and their sample standard deviation, which is 0 for a single one."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def table_of(figures: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Lay out the mean of the figures over the seeds of each setting, with their standard deviation."""
    settings = {}
    for row in figures:
        settings.setdefault(row["setting"] or "all", []).append(row)
    lines = [["mean ± standard deviation over seeds", "seeds", *SHOWN.values()]]
    for setting, rows in settings.items():
        cells = [setting, str(len(rows))]
        for name in SHOWN:
            values = [row[name] for row in rows if row[name] is not None]
            digits = 0 if name == "wall_seconds" else 3
            cells.append("{:.{d}f} ± {:.{d}f}".format(*spread(values), d=digits) if values else "not measured")
        lines.append(cells)
    return lines


def band(series: Sequence[tuple[list[int], list[float]]]) -> tuple[list[int], list[float], list[float]]:
    """Return the mean and the spread of several curves at the steps that all of them have."""
    curves = [dict(zip(steps, values, strict=True)) for steps, values in series]
    steps = sorted(set.intersection(*map(set, curves)))
    points = [spread([curve[step] for curve in curves]) for step in steps]
    return steps, [mean for mean, _ in points], [deviation for _, deviation in points]


def draw_sweep(path: Path, runs: Sequence[tuple[str, Path]], say: Callable[[str], None] = print) -> None:
    """Draw the mean over the seeds of each setting, with a band of one standard deviation to both sides."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = {}
    for setting, run_dir in runs:
        settings.setdefault(setting, []).append(read_metrics(run_dir, say))
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{path.parent.name}: mean over the seeds of a setting, band of one standard deviation")
    colors = matplotlib.colormaps["viridis"]  # in the order of the values
    for axis, (title, unit, name, window) in zip(figure.subplots(1, 2), PANELS, strict=True):
        for i, (setting, measured) in enumerate(settings.items()):
            series = [
                (steps, moving_average(values, window)) for steps, values in (m.get(name, ([], [])) for m in measured)
            ]
            steps, mean, deviation = band(series)
            if not steps:
                continue
            color, seeds = colors(0.9 * i / max(1, len(settings) - 1)), len(measured)
            label = " ".join(filter(None, (setting, f"({seeds} seed{'s' * (seeds > 1)})")))
            axis.plot(steps, mean, "-" if window > 1 else "o-", color=color, label=label)
            low, high = zip(*((m - d, m + d) for m, d in zip(mean, deviation, strict=True)), strict=True)
            axis.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        if axis.lines:
            axis.legend(fontsize="small")
        else:
            axis.text(0.5, 0.5, "not measured in these runs", ha="center", va="center", transform=axis.transAxes)
        axis.set(title=title, xlabel="step", ylabel=unit)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
