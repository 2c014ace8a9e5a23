"""The report of a run folder: its curves are drawn anew, and mistakes are told like those of the other commands."""

import json

from fastgrpo.report import main


def test_the_curves_of_a_run_are_drawn(tmp_path, capsys):
    rows = "".join(json.dumps({"step": step, "reward": step / 3}) + "\n" for step in range(3))
    (tmp_path / "metrics.jsonl").write_text(rows)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_run_must_be_named(tmp_path, capsys):
    for argv, told in (
        ([], "an argument is missing: Folder of a run"),
        ([str(tmp_path)], f"{tmp_path} is not the folder of a run: it has no metrics.jsonl"),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {told}") and len(error.strip().splitlines()) == 1
