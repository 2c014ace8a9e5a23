"""The folder of a run is read as it is: whole, going on, stopped in the middle of a line, or with little in it."""

import pytest
from page_runs import write_run

from fastgrpo.page.reading import find_runs, json_lines, names_of, read_run
from fastgrpo.run.folder import note


def test_a_finished_run(tmp_path):
    told = [{"step": 3, "text": "the entropy collapses"}, {"step": "x", "text": "no step"}, {"step": 2}]
    folder = write_run(tmp_path / "a", summary={"steps": 4}, warnings=told)
    (folder / "checkpoint-4").mkdir()
    (folder / "checkpoint-4" / "README.md").write_text(
        "# A\n\n## Versions\n\n- torch: 2.9\n- fastgrpo: 0.1\n\n## Z\n- b\n"
    )
    (folder / "checkpoint-5").mkdir()  # which a stop left without a card
    run = read_run(folder, "a")
    assert run.finished and run.last_step == 4 and run.versions == ["torch 2.9", "fastgrpo 0.1"]
    assert run.warnings == told[:1] and run.config["task"] == "arithmetic"
    assert run.series["reward"] == ([1, 2, 3, 4], [0.125, 0.25, 0.375, 0.5])


def test_a_run_that_goes_on_after_its_end_is_not_finished(tmp_path):
    assert not read_run(write_run(tmp_path / "a", summary={"steps": 3}), "a").finished
    assert not read_run(write_run(tmp_path / "b"), "b").finished


def test_half_lines_and_damaged_files(tmp_path):
    folder, said = write_run(tmp_path / "a"), []
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rewa')
    (folder / "config.json").write_text('{"task": "ar')
    (folder / "summary.json").write_text("[1]")
    (folder / "warnings.jsonl").write_bytes(b'\xff\n{"step": 1, "text": "kept"}\n{"step": 2, "te')
    run = read_run(folder, "a", said.append)
    assert run.last_step == 4 and run.config == run.summary == {} and not run.finished
    assert run.warnings == [{"step": 1, "text": "kept"}] and len(said) == 1
    assert list(json_lines(folder / "missing.jsonl")) == []


def test_a_run_that_has_not_logged_yet(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    run = read_run(tmp_path, "a")
    assert run.series == {} and run.last_step == 0 and not run.finished


def test_the_folder_of_a_sweep_stands_for_its_runs(tmp_path):
    for name in ("sweep", "other"):
        for run in ("b", "a"):
            write_run(tmp_path / name / run)
        note(tmp_path / name, "sweep.csv")
    found = find_runs([tmp_path / "sweep", tmp_path / "other", tmp_path / "sweep" / "a"])
    assert found == [
        tmp_path / "sweep" / "a",
        tmp_path / "sweep" / "b",
        tmp_path / "other" / "a",
        tmp_path / "other" / "b",
    ]
    assert names_of(found) == ["sweep/a", "sweep/b", "other/a", "other/b"]


def test_a_folder_of_no_run_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"missing is not the folder of a run: it has no metrics.jsonl; name a folder"):
        find_runs([tmp_path / "missing"])
    write_run(tmp_path / "runs" / "a")
    with pytest.raises(ValueError, match=r"there are runs in it; name those to show, such as .*runs/a"):
        find_runs([tmp_path / "runs"])


def test_equal_names_are_told_apart_by_the_folders_above(tmp_path):
    folders = [tmp_path / "x" / "deep" / "run", tmp_path / "y" / "deep" / "run", tmp_path / "other"]
    assert names_of(folders) == ["x/deep/run", "y/deep/run", "other"]
