"""The folder of a run: one run at a time owns it, and only what a run left in it is deleted, on request."""

import os
import socket
import subprocess
import sys

import pytest
from paths import ROOT

from fastgrpo.run.folder import claim_output_dir, empty, hold, is_run


def test_runs_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "gsm8k-7").mkdir()
    assert [claim_output_dir(None, "gsm8k")[0].name for _ in range(2)] == ["gsm8k-8", "gsm8k-9"]
    assert claim_output_dir(None, "arithmetic")[0].name == "arithmetic-1"


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text("old")
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError, match=r"not empty.*--overwrite_output_dir"):
        claim_output_dir(str(tmp_path), "t")
    claim_output_dir(str(tmp_path), "t", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "notes.txt"}
    with pytest.raises(ValueError, match="is a file"):
        claim_output_dir(str(tmp_path / "notes.txt"), "t")


def test_only_what_a_run_leaves_is_deleted(tmp_path):
    for name in (
        "config.json", "metrics.jsonl", "samples.jsonl", "curves.png", "summary.json", "trace.json.gz", "merged",
        "warm-start", "tensorboard", "checkpoint-4", "stale-checkpoint-4", ".tmp-checkpoint-4",
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "checkpoint-mine").symlink_to(tmp_path / "notes")
    (tmp_path / "notes").mkdir()
    (tmp_path / "config.json.bak").write_text("mine")
    empty(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "config.json.bak"}


def test_a_run_is_known_by_its_settings(tmp_path):
    assert not is_run(tmp_path)
    for text, expected in (
        ("{", False),
        ("3", False),
        ('{"hidden_size": 64}', False),
        ('{"resume_from_checkpoint": null}', True),
    ):
        (tmp_path / "config.json").write_text(text)
        assert is_run(tmp_path) == expected, text


def test_a_lock_names_its_owner_and_is_free_when_it_is_closed(tmp_path):
    """Another process is asked, because a process may always lock again what it has locked."""
    ask = """
import sys
from pathlib import Path
from fastgrpo.run.folder import hold
try:
    hold(Path(sys.argv[1]))
except ValueError as error:
    print(error)
"""

    def asked():
        process = subprocess.run(
            [sys.executable, "-c", ask, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True, timeout=60
        )
        return process.stdout

    lock = hold(tmp_path)
    assert f"in use by a run that is still alive (process {os.getpid()} on {socket.gethostname()})" in asked()
    lock.close()
    assert asked() == ""
