"""What is made of a run's metrics when it is over: series, curves, summary and table."""

import json

import pytest
from matplotlib.figure import Figure

from fastgrpo.run import curves
from fastgrpo.run.curves import PANELS, conclude, draw_curves, moving_average, read_metrics, table
from fastgrpo.run.log import METRICS


def write_metrics(folder, rows):
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def test_metrics_are_read_as_series(tmp_path):
    write_metrics(
        tmp_path,
        [{"step": 2, "reward": 0.5, "kl": None}, {"step": 4, "reward": 0.75}, {"step": 4, "eval/accuracy": 1.0}],
    )
    assert read_metrics(tmp_path) == {"reward": ([2, 4], [0.5, 0.75]), "eval/accuracy": ([4], [1.0])}


def test_moving_average():
    assert moving_average([1, 2, 3, 4], window=2) == [1, 1.5, 2.5, 3.5]
    assert moving_average([5.0], window=10) == [5.0] and moving_average([]) == []


def test_the_panels_show_metrics_that_exist():
    shown = [name for _, _, names in PANELS for name in names]
    assert set(shown) <= set(METRICS) and len(shown) == len(set(shown))


def test_the_curves_are_those_of_the_metrics(tmp_path, monkeypatch):
    """The figure is looked at before it becomes a picture, which takes a second."""
    rows = [{"step": i, "reward": i / 10, "accuracy": 0.25} for i in range(1, 21)]
    write_metrics(tmp_path, [*rows, {"step": 0, "eval/accuracy": 0.5}, {"step": 20, "eval/accuracy": 1.0}])
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append((figure, path)))
    assert draw_curves(tmp_path) == tmp_path / "curves.png"
    ((figure, path),) = drawn
    assert path == tmp_path / "curves.png" and len(figure.axes) == len(PANELS)
    axes = {axis.get_title(): axis for axis in figure.axes}
    raw, average = axes["Reward"].lines
    assert raw.get_xydata().tolist() == [[row["step"], row["reward"]] for row in rows]
    assert average.get_ydata().tolist() == pytest.approx(moving_average([row["reward"] for row in rows]))
    assert axes["Reward"].get_ylabel() == "mean total reward" and axes["Reward"].get_xlabel() == "step"
    *_, heldout = axes["Accuracy"].lines  # points as they are: few, and far apart
    assert len(axes["Accuracy"].lines) == 3 and heldout.get_xydata().tolist() == [[0, 0.5], [20, 1.0]]
    assert not axes["Entropy"].lines and axes["Entropy"].texts[0].get_text() == "not measured in this run"


def test_a_run_ends_with_its_summary_and_a_table_of_what_it_left(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "draw_curves", lambda run_dir: (run_dir / "curves.png").write_text("a picture"))
    summary = {"accuracy_after": 0.5, "steps": 3, "accuracy_before": None}
    text = conclude(tmp_path, summary, tmp_path / "checkpoint-3")
    assert json.loads((tmp_path / "summary.json").read_text()) == summary and (tmp_path / "curves.png").exists()
    shown = dict(line.split() for line in text.splitlines())
    assert shown["accuracy_after"] == "0.5" and shown["steps"] == "3" and "accuracy_before" not in shown
    assert shown["checkpoint"] == str(tmp_path / "checkpoint-3") and shown["summary"] == str(tmp_path / "summary.json")
    assert "trace" not in shown and "merged" not in shown
    (tmp_path / "trace.json.gz").write_text("a trace")
    assert f"{tmp_path / 'trace.json.gz'}" in conclude(tmp_path, summary, tmp_path / "checkpoint-3")


def test_table():
    assert table([("a", 1), ("long", "x")]) == "  a     1\n  long  x"
