"""The last evaluations of several runs side by side."""

import json

from fastgrpo.run.comparison import draw_stages, last_evaluation, stage_table


def run(folder, *rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def evaluated(step, accuracy, **more):
    bounds = {"eval/accuracy/ci95_low": accuracy - 0.1, "eval/accuracy/ci95_high": accuracy + 0.05}
    return {"step": step, "eval/accuracy": accuracy, **bounds, **more}


def test_the_last_evaluation_counts(tmp_path):
    first = run(tmp_path / "a", evaluated(0, 0.1), {"step": 1, "loss": 2.0}, evaluated(2, 0.5))
    assert last_evaluation(first) == {
        "eval/accuracy": 0.5, "eval/accuracy/ci95_low": 0.4, "eval/accuracy/ci95_high": 0.55,
    }  # fmt: skip


def test_the_table_has_a_line_for_each_run(tmp_path):
    many = {"eval/pass@1": 0.2, "eval/pass@8": 0.9, "eval/mean_length": 19.3}
    runs = {"sft": run(tmp_path / "a", evaluated(2, 0.25)), "train": run(tmp_path / "b", evaluated(2, 0.75, **many))}
    lines = stage_table(runs)
    assert lines[0] == ["stage", "accuracy", "pass@8", "mean length"]
    assert lines[1] == ["sft", "0.250 [0.150, 0.300]", "", ""]
    assert lines[2] == ["train", "0.750 [0.650, 0.800]", "0.900 [0.900, 0.900]", "19.300 [19.300, 19.300]"]


def test_the_picture_has_a_bar_for_each_value(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    bars, bar = [], Axes.bar
    monkeypatch.setattr(
        Axes, "bar", lambda axis, x, y, *a, **k: bars.append((k["label"], y)) or bar(axis, x, y, *a, **k)
    )
    runs = {"sft": run(tmp_path / "a", evaluated(2, 0.25)), "train": run(tmp_path / "b", evaluated(2, 0.75))}
    path = draw_stages(runs, tmp_path / "stages.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert bars == [("sft", [0.25]), ("train", [0.75]), ("sft", []), ("train", [])]
