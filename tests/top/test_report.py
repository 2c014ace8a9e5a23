"""The report of runs: their page and their curves are made, and nothing else is overwritten."""

import pytest
from page_runs import write_run

from fastgrpo import report
from fastgrpo.report import MADE_BY, main
from fastgrpo.run.curves import PANELS, SUPERVISED_PANELS
from fastgrpo.run.folder import MADE, RunFolder, made_in, note
from fastgrpo.tasks import pizza


@pytest.fixture
def quick(monkeypatch):
    """Leave the picture out, and write a page without plotly. Returns the panels that were asked for."""
    shown = []
    monkeypatch.setattr(report, "draw_curves", lambda run, panels: shown.append(panels) or run / "curves.png")
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    return shown


def test_the_page_and_the_curves_of_a_run_are_made(tmp_path, capsys):
    write_run(tmp_path)
    assert main([str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [str(tmp_path / "curves.png"), str(tmp_path / "report.html")] and not told.err
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    page = (tmp_path / "report.html").read_bytes()
    assert MADE_BY in page[:2000] and 1_000_000 < len(page) < 3_000_000
    assert not list(tmp_path.glob(".*.part"))


def test_several_runs_have_a_page_in_the_working_directory_and_a_sweep_in_its_folder(tmp_path, monkeypatch, quick):
    a, b = write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run")
    monkeypatch.chdir(tmp_path)
    assert main([str(a), str(b)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert '"name": "x/run"' in text and '"name": "y/run"' in text and not (a / "report.html").exists()
    note(tmp_path / "x", "sweep.csv")
    assert main([str(tmp_path / "x")]) == 0
    assert made_in(tmp_path / "x") == {"sweep.csv", "report.html"}


def test_overwrites_only_its_own_page(tmp_path, capsys, quick):
    run, page = write_run(tmp_path / "run"), tmp_path / "page.html"
    for _ in range(2):
        assert main([str(run), "--output", str(page)]) == 0
    page.write_text("mine")
    (run / "report.html").write_text("mine")
    (tmp_path / "folder").mkdir()
    for path in (page, run / "report.html", tmp_path / "folder", tmp_path / "no" / "page.html"):
        capsys.readouterr()
        assert main([str(run), "--output", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    note(run, "metrics.jsonl")  # a folder with notes says itself what a run made
    assert main([str(run)]) == 2
    assert page.read_text() == (run / "report.html").read_text() == "mine"


def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch, quick):
    run = write_run(tmp_path)
    assert main([str(run)]) == 0
    before = (run / "report.html").read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert main([str(run)]) == 2
    assert (run / "report.html").read_text() == before and not list(run.glob(".*.part"))


def test_the_picture_shows_what_the_task_names(tmp_path, capsys, quick):
    cases = {
        '{"task": "pizza"}': pizza.PANELS, '{"command": "sft"}': SUPERVISED_PANELS, '{"task": "mine"}': None,
        '{"task": "piz': None,
    }  # fmt: skip
    write_run(tmp_path)
    for text, panels in cases.items():
        (tmp_path / "config.json").write_text(text)
        assert main([str(tmp_path)]) == 0
        assert ("config.json names no built-in task" in capsys.readouterr().err) == (panels is None), text
        assert quick[-1] is (panels or PANELS), text


@pytest.mark.parametrize("noted", [False, True])
def test_notes_its_files_in_the_run_folder(tmp_path, quick, noted):
    run = RunFolder(tmp_path)
    (run.claim("metrics.jsonl") if noted else tmp_path / "metrics.jsonl").touch()
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / MADE).exists() == noted
    assert made_in(tmp_path) == ({"metrics.jsonl", "curves.png", "report.html"} if noted else set())
