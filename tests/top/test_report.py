"""The report of a run folder: its curves are drawn anew, and mistakes are told like those of the other commands."""

import json

import pytest

from fastgrpo import report
from fastgrpo.report import main
from fastgrpo.run.curves import PANELS, SUPERVISED_PANELS
from fastgrpo.run.folder import MADE, RunFolder, made_in
from fastgrpo.tasks import pizza


def test_the_curves_of_a_run_are_drawn(tmp_path, capsys):
    rows = "".join(json.dumps({"step": step, "reward": step / 3}) + "\n" for step in range(3))
    (tmp_path / "metrics.jsonl").write_text(rows)
    (tmp_path / "config.json").write_text('{"task": "arithmetic"}')
    assert main([str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(tmp_path / "curves.png") and not told.err
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_folder_that_cannot_take_the_picture_is_named(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (tmp_path / "curves.png").mkdir()
    assert main([str(tmp_path)]) == 2
    assert "curves.png is a folder where the picture belongs; move it away" in capsys.readouterr().err


def test_the_picture_shows_what_the_task_names(tmp_path, monkeypatch, capsys):
    """A run from Python may have any task; then, and with a config.json that cannot be read, a line says what it is."""
    shown = []
    monkeypatch.setattr(report, "draw_curves", lambda run, panels: shown.append(panels))
    (tmp_path / "metrics.jsonl").touch()
    assert main([str(tmp_path)]) == 0
    line = f"{tmp_path / 'config.json'} names no task of this package; the usual diagrams are drawn\n"
    assert capsys.readouterr().err == line
    cases = {
        '{"task": "pizza"}': pizza.PANELS, '{"task": "arithmetic"}': PANELS, '{"command": "sft"}': SUPERVISED_PANELS,
        '{"task": "mine"}': None, '{"task": null}': None, "{}": None, "[1]": None, '{"task": "piz': None,
    }  # fmt: skip
    for text, panels in cases.items():
        (tmp_path / "config.json").write_text(text)
        assert main([str(tmp_path)]) == 0
        assert capsys.readouterr().err == ("" if panels else line), text
        assert shown[-1] is (panels or PANELS), text


@pytest.mark.parametrize("noted", [False, True])
def test_the_picture_is_noted_where_the_run_noted_what_it_made(tmp_path, monkeypatch, noted):
    """A first note in a folder without any would tell that all else in it is no run's."""
    monkeypatch.setattr(report, "draw_curves", lambda run, **_: run / "curves.png")
    run = RunFolder(tmp_path)
    (run.claim("metrics.jsonl") if noted else tmp_path / "metrics.jsonl").touch()
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / MADE).exists() == noted and made_in(tmp_path) == (
        {"metrics.jsonl", "curves.png"} if noted else set()
    )


def test_a_run_must_be_named(tmp_path, capsys):
    for argv, told in (
        ([], "an argument is missing: Folder of a run"),
        ([str(tmp_path)], f"{tmp_path} is not the folder of a run: it has no metrics.jsonl"),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {told}") and len(error.strip().splitlines()) == 1
