"""Results of a finished run: series, curves, summary and table."""

import json

import pytest
from matplotlib.figure import Figure

from fastgrpo.run.curves import Panel, conclude, draw_curves, moving_average, read_metrics
from fastgrpo.run.folder import RunFolder


@pytest.mark.parametrize("line", ["{", '{"step": 1, "reward": "much"}', '{"step": 1, "reward": 1' + "0" * 400 + "}"])
def test_metrics_are_read_as_series_and_damaged_lines_are_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward": 0.5, "kl": null}\n' + line + '\n{"step": 2, "reward": Infinity, "eval/accuracy": 1.0}\n'
    )
    said = []
    assert read_metrics(tmp_path, said.append) == {"reward": ([1], [0.5]), "eval/accuracy": ([2], [1.0])}
    assert len(said) == 1 and "metrics.jsonl:2 holds no metrics" in said[0]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw curves, and return the axes by title: the figure is looked at before it becomes a picture."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))

    def draw(rows, **how):
        (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        assert draw_curves(tmp_path, **how) == tmp_path / "curves.png"
        return {axis.get_title(): axis for axis in figures.pop().axes}

    return draw


def test_draws_the_curves_of_the_metrics(drawn):
    rows = [{"step": i, "reward": i / 10, "accuracy": 0.25, "clip_ratio/low_mean": 0.0} for i in range(1, 21)]
    named = {"step": 20, "eval_easy/accuracy": 0.75}
    axes = drawn([*rows, {"step": 0, "eval/accuracy": 0.5}, {"step": 20, "eval/accuracy": 1.0}, named])
    assert list(axes) == ["Reward", "Accuracy"]  # empty panels are left out
    raw, average = axes["Reward"].lines
    assert raw.get_xydata().tolist() == [[row["step"], row["reward"]] for row in rows]
    assert average.get_ydata().tolist() == pytest.approx(moving_average([row["reward"] for row in rows]))
    assert axes["Reward"].get_ylabel() == "mean total reward" and axes["Reward"].get_xlabel() == "step"
    *_, heldout, easy = axes["Accuracy"].lines  # points as they are: few, and far apart
    assert easy.get_xydata().tolist() == [[20, 0.75]] and easy.get_label() == "held-out, greedy, easy"
    assert len(axes["Accuracy"].lines) == 4 and heldout.get_xydata().tolist() == [[0, 0.5], [20, 1.0]]


def test_a_task_chooses_the_panels(drawn):
    panels = (
        Panel("Values", "nats", ("kl",), window=1),
        Panel("Shares", "share", ("eval/pass@1", "eval/pass@2"), dashed=("eval/pass@8", "eval/pass@4")),
        Panel("Nothing", "share", ("eval/accuracy",), dashed=("eval/pass@8",)),
    )
    held_out = [{"step": i, "eval/pass@1": 0.5, "eval/pass@2": i / 4, "eval/pass@4": 1.0} for i in (0, 4)]
    axes = drawn([*held_out, *({"step": i, "kl": float(i)} for i in range(1, 6))], panels=panels)
    assert [line.get_ydata().tolist() for line in axes["Values"].lines] == [[1, 2, 3, 4, 5]]
    first, second, dashed = axes["Shares"].lines  # eval/pass@8 was not measured
    assert dashed.get_linestyle() == "--" and dashed.get_xydata().tolist() == [[0, 1], [4, 1]]
    assert dashed.get_color() == second.get_color() != first.get_color()
    assert "Nothing" not in axes


def test_conclude_writes_the_summary_and_returns_a_table(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 1, "eval_easy/accuracy": 0.5}\n')
    (tmp_path / "curves.png").mkdir()  # which is the user's: it is named, and the rest is written
    run, said = RunFolder(tmp_path), []
    summary = {"accuracy_before": None, "steps": 1234, "wall_seconds": 245.4}
    *rows, (_, files) = conclude(run, summary, tmp_path / "checkpoint-3", said.append)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert rows == [("accuracy, easy", "0.500"), ("steps", "1,234"), ("time", "4:05")]
    assert files == "checkpoint-3, metrics.jsonl, summary.json, config.json"
    assert len(said) == 1 and "curves.png was not made by a run" in said[0]
    (tmp_path / "curves.png").rmdir()
    conclude(run, summary, tmp_path / "checkpoint-3", said.append)
    assert (tmp_path / "curves.png").stat().st_size > 10_000 and len(said) == 1
