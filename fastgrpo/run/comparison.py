"""The last evaluations of several runs side by side, as a table and as a picture."""

from collections.abc import Mapping
from pathlib import Path

from fastgrpo.run.curves import read_metrics

# title -> metric of metrics.jsonl; @ stands for the largest k that was measured
SHARES = {"accuracy": "eval/accuracy", "pass@": "eval/pass@", "format rate": "eval/format_rate"}
LENGTH = {"mean length": "eval/mean_length"}


def last_evaluation(run_dir: str | Path) -> dict[str, float]:
    """Read the last value of each held-out metric of a run."""
    return {name: values[-1] for name, (_, values) in read_metrics(run_dir).items() if name.startswith("eval/")}


def _measured(evaluation, titles):
    """Return (title, value, low, high) of each metric that was measured."""
    rows = []
    for title, name in titles.items():
        if name.endswith("@"):
            draws = [int(key.removeprefix(name)) for key in evaluation if key.removeprefix(name).isdigit()]
            if not draws:
                continue
            title, name = f"{title}{max(draws)}", f"{name}{max(draws)}"
        if name in evaluation:
            value = evaluation[name]
            bounds = (evaluation.get(f"{name}/ci95_{end}", value) for end in ("low", "high"))
            rows.append((title, value, *bounds))
    return rows


def stage_table(runs: Mapping[str, Path]) -> list[list[str]]:
    """Lay out the last evaluations of runs as a table, with 95% intervals in brackets."""
    cells = {
        run: {title: f"{value:.3f} [{low:.3f}, {high:.3f}]" for title, value, low, high in measured}
        for run, folder in runs.items()
        for measured in [_measured(last_evaluation(folder), SHARES | LENGTH)]
    }
    titles = list(dict.fromkeys(title for row in cells.values() for title in row))
    return [["stage", *titles], *([run, *(row.get(title, "") for title in titles)] for run, row in cells.items())]


def draw_stages(runs: Mapping[str, Path], path: Path) -> Path:
    """Draw the last evaluations of runs as bars with their 95% intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    shares, lengths = figure.subplots(1, 2, width_ratios=(3, 1))
    for axis, names, unit in ((shares, SHARES, "share of held-out prompts"), (lengths, LENGTH, "tokens")):
        measured = {run: _measured(last_evaluation(folder), names) for run, folder in runs.items()}
        titles = list(dict.fromkeys(title for rows in measured.values() for title, *_ in rows))
        for place, (run, rows) in enumerate(measured.items()):
            centres = [titles.index(title) + (place - (len(runs) - 1) / 2) * 0.27 for title, *_ in rows]
            values = [value for _, value, _, _ in rows]
            errors = [[max(v - low, 0) for _, v, low, _ in rows], [max(high - v, 0) for _, v, _, high in rows]]
            axis.bar(centres, values, 0.25, yerr=errors, capsize=3, label=run)
        axis.set_xticks(range(len(titles)), titles)
        axis.set(ylabel=unit)
        axis.grid(axis="y", alpha=0.3)
    figure.legend(*shares.get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))
    shares.set_ylim(0, 1.02)
    figure.suptitle("Held-out prompts after each stage, with 95% intervals")
    figure.savefig(path, dpi=100)
    return path
