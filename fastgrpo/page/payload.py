"""Makes what the page shows out of the records of its runs, as a dict that JSON can hold.

The curves of a run share their axes: `at` is where a curve's points lie on them. A metric's name is its key everywhere.
"""

import bisect
import dataclasses
import datetime
import json
from collections.abc import Sequence
from typing import Any

from fastgrpo.page.headline import about, cumulative_seconds, headline
from fastgrpo.page.reading import Run, finite
from fastgrpo.page.rewards import reward_histogram
from fastgrpo.page.samples import samples_of
from fastgrpo.page.thinning import POINTS, kept_of, stretches_of
from fastgrpo.run.curves import PANELS, Panel
from fastgrpo.run.metrics import METRICS

SAMPLES_BYTES = 6_000_000  # of all runs together: the page stays below 15 MB, of which plotly's bundle is 5
FEWEST = 250  # points that a curve may have where a page shows many runs
WARNINGS = 500  # of a run at most, the first ones
ALWAYS = ("completions/mean_length", "frac_informative")  # what every run's page shows where it was measured
# Colors that people with any kind of color vision tell apart, and that show on light and on dark ground.
COLORS = (
    "#3b82d6", "#e0762a", "#2f9e63", "#c94f9b", "#8f6ed5", "#b8891d", "#1f9fb0", "#d1495b", "#7a8791", "#8c6d4f",
)  # fmt: skip


def payload(runs: Sequence[Run], panels: Sequence[Panel]) -> dict[str, Any]:
    """Make what a page shows."""
    points = max(FEWEST, min(POINTS, 2 * POINTS // len(runs)))
    return {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        "made": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        "panels": [dataclasses.asdict(panel) for panel in [*panels, *_missing(panels)]],
        "metrics": METRICS,
        "runs": [
            _run(run, COLORS[place % len(COLORS)], points, SAMPLES_BYTES // len(runs)) for place, run in enumerate(runs)
        ],
    }


def _missing(panels):
    """Find the usual diagrams that a task's own panels leave out, and that every page shows."""
    shown = {metric for panel in panels for metric in panel.metrics}
    return [panel for panel in PANELS if set(panel.metrics) & set(ALWAYS) - shown]


def _run(run, color, points, budget):
    axes, series, note = _curves(run, points)
    shown, more = run.warnings[:WARNINGS], len(run.warnings) - WARNINGS
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
        "settings": {name: text_of(value) for name, value in run.config.items()},
        "finished": run.finished,
        "rewards": reward_histogram(run.folder, run.config.get("reward_weights") or ()),
        "samples": samples_of(run.folder, budget),
    }


def _curves(run, points):
    """Thin the curves of a run. Returns their axes, the curves, and a note where any was thinned."""
    kept = {name: kept_of(values, points) for name, (_, values) in run.series.items()}
    # The stages of a step are stacked, so all of them keep the same points: those of the whole step.
    whole = run.series.get("step_time", ([], []))
    stages = [name for name in kept if name.startswith("time/") and run.series[name][0] == whole[0]]
    kept |= {name: kept["step_time"] for name in stages}
    steps = sorted({run.series[name][0][place] for name, places in kept.items() for place in places})
    place_of = {step: place for place, step in enumerate(steps)}
    series, thinned = {}, 0
    for name, (at, values) in run.series.items():
        series[name] = {
            "at": [place_of[at[place]] for place in kept[name]],
            "value": [_short(values[place]) for place in kept[name]],
        }
        if len(values) > points:
            thinned += 1
            means, lines = stretches_of(values, kept[name])
            series[name] |= {"mean": [_short(mean) for mean in means], "lines": lines}
    note = (
        f"{run.name}: {thinned} curves are drawn with at most {points:,} points. The smallest and the largest value of "
        "each stretch are kept, and the moving average is over all values."
    )
    return _axes(run, steps), series, note if thinned else ""


def _axes(run, steps):
    """Say what each step is in tokens and in seconds: as of the last line that knows it."""
    seconds = cumulative_seconds(run)
    tokens = run.series.get("num_tokens", ([], []))
    known = {"tokens": tokens, "seconds": (list(seconds), list(seconds.values()))}
    axes = {"step": steps}
    for name, (at, values) in known.items():
        places = [bisect.bisect_right(at, step) for step in steps] if values else []
        axes[name] = [_short(values[place - 1], 9) if place else 0 for place in places]
    return axes


def text_of(value: Any) -> str:
    """Write the value of a setting as the page shows it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(value, digits=6):
    """Round to so many digits. What is not finite, as the mean of numbers near the largest may be, is null."""
    return value if isinstance(value, int) else None if finite(value) is None else float(f"{value:.{digits}g}")
