"""Commands in a pipe: a reader that leaves, and a terminal without the characters of a text."""

import os
import subprocess
import sys

import pytest
import tiny
from mistakes import Case
from paths import ROOT

from fastgrpo.run.checkpoint import checkpoints, verify


@pytest.fixture
def case(tmp_path, monkeypatch):
    return Case(tmp_path, tiny.save(tmp_path / "saved"), monkeypatch)


def start(case, command, argv, **environment):
    """The process of a command, whose stdout is a pipe and whose stderr goes to a file."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{case.folder}", "OMP_NUM_THREADS": "1", **environment}
    with open(case.folder / "stderr", "w") as told:
        return subprocess.Popen(
            [sys.executable, "-m", f"fastgrpo.{command}", *argv], env=environment, cwd=case.folder,
            stdout=subprocess.PIPE, stderr=told,
        )  # fmt: skip


def test_a_run_that_nobody_reads_saves_and_leaves_quietly(case):
    """`train | head -1`: the exit code is that of SIGPIPE, there is no traceback, and the run can go on."""
    (case.folder / "test.jsonl").write_text(case.rows.read_text())
    endless = {"dataset_name": case.folder, "max_steps": 100_000, "save_steps": 100_000, "eval_steps": 1}
    process = start(case, "train", case.argv(**endless))
    while not process.stdout.readline().startswith(b"step 1: held-out"):
        assert process.poll() is None, (case.folder / "stderr").read_text()
    process.stdout.close()
    assert process.wait(timeout=100) == 141
    told = (case.folder / "stderr").read_text()
    assert "Traceback" not in told and "nobody reads the output any more: finishing the step, then saving" in told
    verify(max(checkpoints(case.run).items())[1])


def test_a_terminal_of_ascii_gets_escapes(case):
    argv = [str(case.model), "--prompt", "a", "-n", "8", "--seed", "1", "--device", "cpu"]
    process = start(case, "chat", argv, PYTHONIOENCODING="ascii")
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 0, (case.folder / "stderr").read_text()
    assert rb"\ufffd" in said and said.isascii()
