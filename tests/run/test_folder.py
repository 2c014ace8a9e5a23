"""The folder of a run: one run at a time holds it, and what no run made in it is neither deleted nor overwritten."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from paths import ROOT

from fastgrpo.run.folder import LOCK, MADE, RunFolder, claim_output_dir, contents, made_in

EVERY_NAME = (
    "config.json", "metrics.jsonl", "samples.jsonl", "curves.png", "summary.json", "trace.json.gz", "merged",
    "warm-start", "tensorboard", "wandb", "checkpoint-4", "stale-checkpoint-4", "stale-checkpoint-4+",
    ".tmp-checkpoint-4", "sweep.csv", "sweep.png", "beta=0.1,seed=0.log",
    "final", "trainer_state.json", "eval_results.json",
)  # fmt: skip


def folder_with(path, name):
    (path / name).mkdir(parents=True)
    (path / name / "file").write_text("years of work")


def test_runs_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "gsm8k-7").mkdir(parents=True)
    assert [claim_output_dir(None, "gsm8k").path.name for _ in range(2)] == ["gsm8k-8", "gsm8k-9"]
    assert claim_output_dir(None, "arithmetic").path.name == "arithmetic-1"


def test_runs_that_start_at_the_same_moment_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        runs = [*threads.map(lambda _: claim_output_dir(None, "t"), range(40))]
    assert {run.path.name for run in runs} == {f"t-{number}" for number in range(1, 41)}


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
    run.close()
    with pytest.raises(ValueError, match=r"not empty.*--overwrite_output_dir"):
        claim_output_dir(str(tmp_path), "t")
    claim_output_dir(str(tmp_path), "t", overwrite=True).close()
    assert {entry.name for entry in contents(tmp_path)} == set(kept) and made_in(tmp_path) == set()


@pytest.mark.parametrize("name", EVERY_NAME)
def test_what_no_run_made_is_neither_deleted_nor_overwritten(tmp_path, name):
    folder_with(tmp_path / "folder", name)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for path in (tmp_path / "folder", tmp_path / "link"):
        with pytest.raises(ValueError, match=rf"{name.replace('+', '.')}, which no run made"):
            claim_output_dir(str(path), "t", overwrite=True)
        run = RunFolder(path)
        with pytest.raises(ValueError, match="not overwritten"):
            run.claim(name)
        run.close()
        assert (path / name / "file").read_text() == "years of work"


def test_a_holder_that_nothing_refers_to_gives_its_folder_back(tmp_path):
    class Trainer:
        def __init__(self):
            self.lock, self.circle = RunFolder(tmp_path), self

    Trainer()
    RunFolder(tmp_path).close()


def test_what_is_not_a_lock_is_refused_and_keeps_its_content(tmp_path):
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    for number, make in enumerate((lambda lock: lock.symlink_to(thesis), lambda lock: lock.write_text("4711\n"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / LOCK)
        with pytest.raises(ValueError, match=rf"{number}/.lock is not the lock of a run"):
            RunFolder(folder)
    assert thesis.read_text() == "years of work"
    assert (tmp_path / "1" / LOCK).read_text() == "4711\n"  # of another program


HOLD = """
import os, sys, time
from pathlib import Path
from fastgrpo.run.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
if pid := os.fork():
    print(pid, flush=True)
time.sleep(600)
"""


def test_a_folder_in_use_names_its_process_and_is_free_when_that_is_killed_even_if_it_had_forked(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as child:
        forked = int(child.stdout.readline())
        try:
            with pytest.raises(ValueError, match=rf"\(process {child.pid} on {socket.gethostname()}\)"):
                RunFolder(tmp_path)
            child.kill()
            child.wait(60)
            RunFolder(tmp_path).close()
        finally:
            os.kill(forked, signal.SIGKILL)
