"""What is made of a run's metrics when it is over: series, curves, summary and table."""

import json

import pytest
from matplotlib.figure import Figure

from fastgrpo.run import curves
from fastgrpo.run.curves import PANELS, Panel, conclude, draw_curves, moving_average, read_metrics, table
from fastgrpo.run.folder import RunFolder
from fastgrpo.run.metrics import METRICS


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
    shown = [name for panel in PANELS for name in panel.metrics]
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


def test_a_task_chooses_the_panels(tmp_path, monkeypatch):
    """A window of 1 shows the values alone; evaluations are points, and what was not measured has no curve."""
    write_metrics(tmp_path, [{"step": 0, "eval/pass@1": 0.5}, *({"step": i, "kl": float(i)} for i in range(1, 6))])
    panels = (
        Panel("Values", "nats", ("kl",), window=1),
        Panel("Averages", "nats", ("kl", "reward"), ("KL", "reward"), window=5),
        Panel("Evaluations", "share", ("eval/pass@1",), ("held-out",)),
        Panel("Nothing", "share", ("eval/accuracy",)),
    )
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    draw_curves(tmp_path, panels=panels)
    axes = {axis.get_title(): axis for axis in drawn[0].axes}
    assert list(axes) == ["Values", "Averages", "Evaluations", "Nothing"]
    (values,) = axes["Values"].lines
    assert values.get_ydata().tolist() == [1, 2, 3, 4, 5]
    raw, average = axes["Averages"].lines
    assert raw.get_ydata().tolist() == [1, 2, 3, 4, 5] and average.get_ydata().tolist() == [1, 1.5, 2, 2.5, 3]
    assert [text.get_text() for text in axes["Averages"].get_legend().get_texts()] == ["KL"]
    assert axes["Evaluations"].lines[0].get_xydata().tolist() == [[0, 0.5]] and not axes["Nothing"].lines
    assert "moving average over 5 or 10 logged steps" in drawn[0].get_suptitle()


def test_a_dashed_line_has_the_color_of_what_it_is_compared_with(tmp_path, monkeypatch):
    write_metrics(tmp_path, [{"step": i, "eval/pass@1": 0.5, "eval/pass@2": i / 4, "eval/pass@4": 1.0} for i in (0, 4)])
    panels = (
        Panel("Shares", "share", ("eval/pass@1", "eval/pass@2"), dashed=("eval/pass@8", "eval/pass@4")),
        Panel("Nothing", "share", ("kl",), dashed=("eval/pass@8",)),
    )
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    draw_curves(tmp_path, panels=panels)
    shares, nothing = drawn[0].axes
    first, second, dashed = shares.lines  # eval/pass@8 was not measured
    assert dashed.get_linestyle() == "--" and dashed.get_xydata().tolist() == [[0, 1], [4, 1]]
    assert dashed.get_color() == second.get_color() != first.get_color()
    assert [text.get_text() for text in shares.get_legend().get_texts()] == ["eval/pass@1", "eval/pass@2"]
    assert nothing.texts[0].get_text() == "not measured in this run"


def test_the_table_compares_the_evaluation_before_the_first_step_with_the_last_one(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "draw_curves", lambda run_dir, *_: (run_dir / "curves.png").write_text("a picture"))
    names = ("eval/pass@1", "eval/loss", "eval/accuracy", "eval/pass@2")
    measured = [{"step": 0, "eval/loss": 2.0}, *({"step": i, "eval/pass@1": i / 10, "eval/loss": 1.0} for i in (5, 9))]
    panels = (Panel("Held out", "share", (*names[1:], "kl"), ("a", "b", "c", "d")),)

    def rows(lines):
        write_metrics(tmp_path, lines)
        table = conclude(RunFolder(tmp_path), {"steps": 9}, tmp_path / "checkpoint-9", pytest.fail, panels)
        assert [name for name, _ in table[-2:]] == ["steps", "files"]
        return table[:-2]

    assert rows(measured) == [("pass@1", "0.900"), ("Held out: a", "2.000 -> 1.000")]
    every = [{"step": step, **dict.fromkeys(names, step / 8)} for step in (0, 4, 8)]
    assert [name for name, _ in rows(every)] == ["accuracy", "pass@1", "Held out: a", "Held out: c"]
    assert {value for _, value in rows(every)} == {"0.000 -> 1.000"}
    assert {value for _, value in rows(every[:1])} == {"0.000"}
    for row in every:
        row |= {"eval/accuracy/ci95_low": 0.0, "eval/accuracy/ci95_high": 0.25 + row["step"] / 16}
    assert rows(every)[0] == ("accuracy [95%]", "0.000 [0.000, 0.250] -> 1.000 [0.000, 0.750]")
    del every[0]["eval/accuracy/ci95_low"]
    assert rows(every)[0] == ("accuracy", "0.000 -> 1.000")


def test_a_run_ends_with_its_summary_and_a_table_of_what_it_left(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "draw_curves", lambda run_dir, *_: (run_dir / "curves.png").write_text("a picture"))
    summary = {
        "accuracy_before": None,
        "steps": 1234,
        "wall_seconds": 245.4,
        "num_tokens": 5_000_000,
        "peak_memory_gib": 1.5,
    }
    run = RunFolder(tmp_path)
    rows = conclude(run, summary, tmp_path / "checkpoint-3", pytest.fail)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary and (tmp_path / "curves.png").exists()
    assert rows == [
        ("steps", "1,234"), ("tokens", "5,000,000"), ("time", "4:05"), ("peak memory", "1.50 GiB"),
        ("files", "checkpoint-3, metrics.jsonl, summary.json, curves.png, config.json"),
    ]  # fmt: skip
    (tmp_path / "trace.json.gz").write_text("a trace")
    (tmp_path / "samples.jsonl").write_text("")
    (_, files) = conclude(run, summary, tmp_path / "checkpoint-3", pytest.fail)[-1]
    assert files.endswith(", config.json, trace.json.gz")


def test_what_cannot_be_written_at_the_end_is_named_and_the_rest_is_written(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'\x80rubbish\n{"step": 1, "reward": 0.5}\n' + b"[" * 100_000 + b"\n7\n")
    (tmp_path / "curves.png").mkdir()
    said, run = [], RunFolder(tmp_path)
    (_, files) = conclude(run, {"steps": 3}, tmp_path / "checkpoint-3", said.append)[-1]
    assert "summary.json" in files and "curves.png" not in files
    assert said == [
        f"warning: curves.png is not written: {tmp_path}/curves.png was not made by a run and is not overwritten; move "
        "it away"
    ]
    (tmp_path / "curves.png").rmdir()
    (_, files) = conclude(run, {"steps": 3}, tmp_path / "checkpoint-3", said.append)[-1]
    assert "curves.png" in files and (tmp_path / "curves.png").stat().st_size > 10_000
    assert said[1:] == [f"warning: {tmp_path}/metrics.jsonl:1 holds no metrics; 3 such lines are passed over"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "7",
        '"text"',
        '{"reward": 1}',
        '{"step": 1, "reward": "much"}',
        "\x00",
        "[" * 10**5,
        '{"step": 1, "reward": 1' + "0" * 400 + "}",
        '{"step": 1' + "0" * 400 + "}",
    ],
)
def test_lines_that_hold_no_metrics_are_named_and_passed_over(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward": 0.5}\n' + line + '\n{"step": 2, "reward": Infinity}\n'
    )
    said = []
    assert read_metrics(tmp_path, said.append) == {"reward": ([1], [0.5])}
    assert said == [f"warning: {tmp_path}/metrics.jsonl:2 holds no metrics; 1 such lines are passed over"]


def test_table():
    assert table([("a", 1), ("long", "x")]) == "  a     1\n  long  x"
