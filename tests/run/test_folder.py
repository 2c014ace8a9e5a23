"""The folder of a run: only what a run noted as its own is deleted, and nothing else is overwritten."""

import os
import subprocess
import sys

import pytest
from paths import ROOT

from fastgrpo.run.folder import MADE, RunFolder, claim_output_dir, contents, made_in, note

EVERY_NAME = (
    "config.json", "metrics.jsonl", "samples.jsonl", "curves.png", "summary.json", "trace.json.gz", "merged",
    "warm-start", "tensorboard", "wandb", "checkpoint-4", "stale-checkpoint-4", "stale-checkpoint-4+",
    ".tmp-checkpoint-4", "sweep.csv", "sweep.png", "beta=0.1,seed=0.log",
    "final", "trainer_state.json", "eval_results.json",
)  # fmt: skip


def folder_with(path, name):
    """Make a folder with one file in it under this name."""
    (path / name).mkdir(parents=True)
    (path / name / "file").write_text("years of work")


def names(path):
    return {entry.name for entry in contents(path)}


def test_runs_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "gsm8k-7").mkdir()
    assert [claim_output_dir(None, "gsm8k").path.name for _ in range(2)] == ["gsm8k-8", "gsm8k-9"]
    assert claim_output_dir(None, "arithmetic").path.name == "arithmetic-1"


def test_runs_that_start_at_the_same_moment_get_folders_of_their_own(tmp_path):
    """Each of six processes takes ten folders. All wait for one file, so that they begin together."""
    code = """
import sys
from pathlib import Path
from fastgrpo.run.folder import claim_output_dir
print("ready", flush=True)
while not Path("go").exists():
    pass
print(*(claim_output_dir(None, "t").path.name for _ in range(10)), flush=True)
"""
    command = [sys.executable, "-c", code]
    pythonpath = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=pythonpath) for _ in range(6)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    taken = [name for process in processes for name in process.communicate(timeout=120)[0].split()]
    assert sorted(taken) == sorted(f"t-{number}" for number in range(1, 61))


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    run = RunFolder(tmp_path)
    run.claim("metrics.jsonl").write_text("old")
    run.claim("checkpoint-3").mkdir()
    run.close()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not empty.*--overwrite_output_dir"):
        claim_output_dir(str(tmp_path), "t")
    claim_output_dir(str(tmp_path), "t", overwrite=True).close()
    assert names(tmp_path) == {"notes.txt"}
    with pytest.raises(ValueError, match="is a file"):
        claim_output_dir(str(tmp_path / "notes.txt"), "t")


def test_only_what_a_run_made_is_deleted(tmp_path):
    run = RunFolder(tmp_path)
    for name in EVERY_NAME:
        folder_with(tmp_path, run.claim(name).name)
    kept = ("checkpoint-of-my-thesis", "checkpoint-mine", "config.json.bak", "best-checkpoint-4", "runs")
    for name in kept:
        folder_with(tmp_path, name)
    with open(tmp_path / MADE, "a") as file:
        file.write("checkpoint-mine\nruns\n../elsewhere\n.\n")  # names that a run never gives are no notes
    assert {path.name for path in run.made()} == set(EVERY_NAME)
    run.empty()
    assert names(tmp_path) == set(kept) and made_in(tmp_path) == set()


@pytest.mark.parametrize("name", EVERY_NAME)
@pytest.mark.parametrize("through_a_link", [False, True])
def test_what_no_run_made_is_neither_deleted_nor_overwritten(tmp_path, name, through_a_link):
    path = tmp_path / "folder"
    folder_with(path, name)
    if through_a_link:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    with pytest.raises(ValueError, match=rf"holds {name.replace('+', '.')}, which no run made there"):
        claim_output_dir(str(path), "t", overwrite=True)
    run = RunFolder(path)
    with pytest.raises(ValueError, match="was not made by a run and is not overwritten; move it away"):
        run.claim(name)
    assert (path / name / "file").read_text() == "years of work"


def test_what_takes_the_place_of_something_deleted_is_no_runs(tmp_path):
    run = RunFolder(tmp_path)
    run.claim("checkpoint-4").mkdir()
    run.remove("checkpoint-4")
    folder_with(tmp_path, "checkpoint-4")
    assert [path.name for path in run.foreign()] == ["checkpoint-4"] and run.made() == []
    note(tmp_path, "checkpoint-4")
    assert [path.name for path in run.made()] == ["checkpoint-4"] and run.foreign() == []


def test_what_is_renamed_stays_a_runs(tmp_path):
    run = RunFolder(tmp_path)
    run.claim("checkpoint-4").mkdir()
    folder_with(tmp_path, "stale-checkpoint-4")
    with pytest.raises(ValueError, match="stale-checkpoint-4 was not made by a run"):
        run.rename("checkpoint-4", "stale-checkpoint-4")
    assert run.rename("checkpoint-4", "stale-checkpoint-4+") == tmp_path / "stale-checkpoint-4+"
    assert made_in(tmp_path) == {"stale-checkpoint-4+"}


def test_notes_that_are_something_else_are_not_followed(tmp_path):
    (tmp_path / "list").write_text("merged\n")
    folder_with(tmp_path, "merged")
    (tmp_path / MADE).symlink_to(tmp_path / "list")
    run = RunFolder(tmp_path)
    assert run.made() == []
    for make in (None, os.mkdir, os.mkfifo):
        if make is not None:
            (tmp_path / MADE).rmdir() if (tmp_path / MADE).is_dir() else (tmp_path / MADE).unlink()
            make(tmp_path / MADE)
        with pytest.raises(ValueError, match=f"{MADE} is not a list of what runs made there; move it away"):
            run.claim("config.json")
    assert (tmp_path / "list").read_text() == "merged\n"


def test_notes_are_on_the_disk_before_the_thing_is_made(tmp_path, monkeypatch):
    """A machine that fails could otherwise keep a checkpoint and lose its note."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    run = RunFolder(tmp_path)
    run.claim("checkpoint-4")
    note(tmp_path, "merged", "config.json")
    assert synced == [len("checkpoint-4\n"), len("checkpoint-4\nmerged\nconfig.json\n")]
    assert made_in(tmp_path) == {"checkpoint-4", "merged", "config.json"}


def test_a_run_stays_in_its_folder_though_a_link_to_it_moves(tmp_path):
    for name in ("mine", "other"):
        (tmp_path / name / "deeper").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    runs = [
        claim_output_dir(str(tmp_path / "link"), "t", overwrite=True),
        RunFolder(tmp_path / "link/deeper/../deeper"),
    ]
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    for run in runs:
        run.claim("config.json").touch()
    assert names(tmp_path / "mine") == {"deeper", "config.json"} and names(tmp_path / "mine/deeper") == {"config.json"}
    assert names(tmp_path / "other") == {"deeper"}
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(ValueError, match=r"circle cannot be written: .*; choose another folder"):
        claim_output_dir(str(tmp_path / "circle"), "t", inputs={"the model": tmp_path})


def test_a_folder_that_was_released_is_not_gone_on_with(tmp_path):
    run = RunFolder(tmp_path)
    run.check()
    run.close()
    with pytest.raises(ValueError, match=r"no longer holds output_dir .*because its run has ended; make a new trainer"):
        run.check()


def test_what_a_run_reads_may_not_lie_in_its_folder(tmp_path):
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = list((tmp_path / "run").iterdir())
    for path in (tmp_path / "run", tmp_path / "link"):
        for file in (tmp_path / "run", tmp_path / "run" / "checkpoint-2", tmp_path / "link" / "checkpoint-2"):
            for how in ({}, {"overwrite": True}, {"resume": True}):
                with pytest.raises(
                    ValueError, match=r"the model .* lies inside output_dir .*choose another output_dir"
                ):
                    claim_output_dir(str(path), "t", inputs={"the model": file}, **how)
    assert list((tmp_path / "run").iterdir()) == before
    claim_output_dir(str(tmp_path / "run" / "deeper"), "t", inputs={"the model": tmp_path / "run"}).close()
