"""A run folder -> what a person can look at: curves.png, summary.json, a table."""

import json
from pathlib import Path

PANELS = (
    # title, unit of the vertical axis, metrics
    ("Reward", "mean total reward", ("reward",)),
    ("Accuracy", "share right", ("accuracy", "eval/accuracy")),
    ("KL to the reference", "nats a token", ("kl",)),
    ("Clipped tokens", "share", ("clip_ratio/low_mean", "clip_ratio/high_mean")),
    ("Completion length", "tokens", ("completions/mean_length",)),
    ("Entropy", "nats a token", ("entropy",)),
    ("Advantage magnitude", "mean |A|", ("advantage/abs_mean",)),
    ("Groups with spread", "share", ("frac_informative",)),
)


WINDOW = 10  # lines of metrics.jsonl in the moving average


def read_metrics(run_dir):
    """metrics.jsonl -> {name: (steps, values)}."""
    series = {}
    for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name != "step" and value is not None:
                steps, values = series.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
    return series


def moving_average(values, window=WINDOW):
    """Mean of the last `window` values at each place (fewer at the start)."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def draw_curves(run_dir):
    """Write run_dir/curves.png and return its path: raw values faint, their moving average strong."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = read_metrics(run_dir)
    figure = Figure(figsize=(16, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{Path(run_dir).resolve().name}: GRPO, moving average over {WINDOW} logged steps")
    for axis, (title, unit, names) in zip(figure.subplots(2, 4).flat, PANELS, strict=True):
        for color, name in zip(("tab:blue", "tab:orange"), names, strict=False):
            steps, values = series.get(name, ([], []))
            if name.startswith("eval/"):
                axis.plot(steps, values, "o-", color=color, label="held-out, greedy")
            elif values:
                axis.plot(steps, values, color=color, alpha=0.25)
                axis.plot(steps, moving_average(values), color=color, label=name)
        if axis.lines:
            axis.legend(fontsize="small")
        else:
            axis.text(0.5, 0.5, "not measured in this run", ha="center", va="center", transform=axis.transAxes)
        axis.set(title=title, xlabel="step", ylabel=unit)
        axis.grid(alpha=0.3)
    path = Path(run_dir) / "curves.png"
    figure.savefig(path, dpi=100)
    return path


def conclude(run_dir, summary, checkpoint):
    """Write summary.json and curves.png. Returns a table of the summary and of what is in the folder, as text."""
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw_curves(run_dir)
    files = {"checkpoint": checkpoint.name, "metrics": "metrics.jsonl", "samples": "samples.jsonl"}
    files |= {"curves": "curves.png", "summary": "summary.json", "config": "config.json"}
    optional = {"merged": "merged", "trace": "trace.json.gz"}
    files |= {name: file for name, file in optional.items() if (run_dir / file).exists()}
    shown = [(name, value) for name, value in summary.items() if value is not None]
    return table([*shown, *((name, run_dir / file) for name, file in files.items())])


def table(rows):
    """[(name, value)] -> aligned lines."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
