"""The table and the picture of a sweep."""

import csv
import json

import pytest
from matplotlib.figure import Figure

from fastgrpo.config.sweep import runs_of, take_sweep
from fastgrpo.run.sweep_report import PANELS, band, draw_sweep, figures_of, spread, table_of, write_table


def write_run(folder, rewards, after, before=0.25):
    folder.mkdir()
    rows = [{"step": i + 1, "reward": reward} for i, reward in enumerate(rewards)]
    rows += [{"step": 0, "eval/accuracy": before}, {"step": len(rewards), "eval/accuracy": after}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"accuracy_before": before, "accuracy_after": after, "steps": len(rewards), "wall_seconds": 7.5}
    (folder / "summary.json").write_text(json.dumps(summary | {"num_tokens": 640}))


@pytest.fixture
def figures(tmp_path):
    runs = runs_of(*take_sweep(["--sweep", "num_generations=2,4", "--sweep_seeds", "0,1"]))
    for i, run in enumerate(runs):
        write_run(tmp_path / run.name, [i / 10] * 12 + [1 + i] * 10, after=(i + 1) / 10)
    return [figures_of(run, tmp_path / run.name) for run in runs]


def test_a_line_of_csv_for_each_run(figures, tmp_path):
    write_table(tmp_path / "sweep.csv", ["num_generations", "seed"], figures)
    with open(tmp_path / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[1] == {
        "num_generations": "2", "seed": "1", "accuracy_before": "0.25", "accuracy_after": "0.2", "reward": "2",
        "steps": "22", "num_tokens": "640", "wall_seconds": "7.5", "folder": "num_generations=2,seed=1",
    }  # fmt: skip
    assert [row["reward"] for row in rows] == ["1", "2", "3", "4"]  # of the last ten lines, not of the twelve before


def test_the_printed_table_has_mean_and_deviation_over_seeds(figures):
    head, first, second = table_of(figures)
    assert head[0] == "mean ± standard deviation over seeds"
    assert first == ["num_generations=2", "2", "0.250 ± 0.000", "0.150 ± 0.071", "1.500 ± 0.707", "8 ± 0"]
    assert second[0] == "num_generations=4" and "0.350 ± 0.071" in second
    _, unmeasured = table_of([{**figures[0], "setting": "", "accuracy_after": None}])
    assert unmeasured[0] == "all" and "not measured" in unmeasured


def test_spread():
    assert spread([1.0, 3.0]) == (2.0, pytest.approx(2**0.5)) and spread([4.0]) == (4.0, 0.0)


def test_a_band_is_over_the_steps_that_all_curves_have():
    steps, mean, deviation = band([([1, 2, 3], [0.0, 1.0, 5.0]), ([2, 3, 4], [3.0, 5.0, 9.0])])
    assert (steps, mean) == ([2, 3], [2.0, 5.0]) and deviation == pytest.approx([2**0.5, 0.0])
    assert band([([1], [0.0]), ([], [])]) == ([], [], [])


def test_the_picture_has_a_band_for_each_setting(figures, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append((figure, path)))
    draw_sweep(tmp_path / "sweep.png", [(row["setting"], tmp_path / row["folder"]) for row in figures])
    ((figure, path),) = drawn
    assert path == tmp_path / "sweep.png"
    reward, accuracy = figure.axes
    assert [axis.get_title() for axis in figure.axes] == [title for title, *_ in PANELS]
    for axis in figure.axes:
        labels = [text.get_text() for text in axis.get_legend().get_texts()]
        assert labels == ["num_generations=2 (2 seeds)", "num_generations=4 (2 seeds)"]
        assert len(axis.collections) == 2  # the bands
    assert reward.lines[1].get_ydata()[0] == pytest.approx(0.25) and len(reward.lines[1].get_ydata()) == 22
    assert accuracy.lines[0].get_xydata().tolist() == [[0, 0.25], [22, pytest.approx(0.15)]]


def test_a_metric_that_no_run_has_is_said_so(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    draw_sweep(tmp_path / "sweep.png", [("", tmp_path / "a")])
    reward, accuracy = drawn[0].axes
    assert reward.get_legend().get_texts()[0].get_text() == "(1 seed)"
    assert not accuracy.lines and accuracy.texts[0].get_text() == "not measured in these runs"
