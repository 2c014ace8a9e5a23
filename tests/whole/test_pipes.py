"""A reader that leaves its pipe, and a terminal without the characters of a text."""

import os
import subprocess
import sys

import pytest
from mistakes import Case
from paths import ROOT

from fastgrpo.chat import main
from fastgrpo.run.checkpoint import checkpoints, verify


@pytest.mark.slow
def test_a_run_whose_reader_leaves_saves_and_exits_by_sigpipe(tmp_path, saved, monkeypatch):
    case = Case(tmp_path, saved, monkeypatch)
    (case.folder / "test.jsonl").write_text(case.rows.read_text())
    argv = case.argv(dataset_name=case.folder, max_steps=100_000, save_steps=100_000, eval_steps=1)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{case.folder}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fastgrpo.train", *argv], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not process.stdout.readline().startswith("step 1: held-out"):
        assert process.poll() is None, process.stderr.read()
    process.stdout.close()
    told = process.stderr.read()
    assert process.wait(timeout=100) == 141
    assert "Traceback" not in told and "the output pipe was closed: finishing the step, then saving" in told
    verify(max(checkpoints(case.run).items())[1])


def test_a_terminal_of_ascii_gets_escapes(saved, monkeypatch, tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main([str(saved), "--prompt", "a", "-n", "8", "--seed", "1", "--device", "cpu"]) == 0
    said = (tmp_path / "out").read_bytes()
    assert rb"\ufffd" in said and said.isascii()
