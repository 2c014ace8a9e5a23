"""The lock of a run folder: one holder, in this process and in all others, and no file of somebody else is written."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from paths import ROOT

from fastgrpo.run.folder import LOCK, RunFolder

ASK = """
import sys
from pathlib import Path
from fastgrpo.run.folder import RunFolder
try:
    folder = RunFolder(Path(sys.argv[1]))
except ValueError as error:
    print(error)
"""


def asked(folder):
    """What another process is told that asks for the lock."""
    command = [sys.executable, "-c", ASK, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60).stdout


def test_a_lock_names_its_owner_and_is_free_when_it_is_closed(tmp_path):
    lock = RunFolder(tmp_path)
    assert f"in use by a run that is still alive (process {os.getpid()} on {socket.gethostname()})" in asked(tmp_path)
    lock.close()
    assert asked(tmp_path) == ""


def test_a_second_holder_in_one_process_is_refused_and_leaves_the_first_its_lock(tmp_path):
    lock = RunFolder(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(ValueError, match=r"is in use by another trainer of this process; let its train\(\) end"):
            RunFolder(path)
    assert "in use by a run that is still alive" in asked(tmp_path)
    lock.close()
    RunFolder(tmp_path).close()


def test_a_holder_that_nothing_refers_to_gives_its_folder_back(tmp_path):
    class Trainer:
        def __init__(self):
            self.lock, self.circle = RunFolder(tmp_path), self

    Trainer()
    RunFolder(tmp_path).close()


def test_a_lock_that_was_closed_does_not_release_the_next_one(tmp_path):
    first = RunFolder(tmp_path)
    first.close()
    second = RunFolder(tmp_path)
    first.close()
    assert second.held and not first.held and "in use by a run that is still alive" in asked(tmp_path)
    second.close()
    assert not second.held and asked(tmp_path) == ""


def test_what_is_not_a_lock_is_refused_and_keeps_its_content(tmp_path):
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")

    def link(lock):
        lock.symlink_to(thesis)

    def dangling(lock):
        lock.symlink_to(tmp_path / "nowhere")

    def hard_link(lock):
        os.link(thesis, lock)

    def lock_of_another_program(lock):
        lock.write_text("4711\n")

    made = (link, dangling, hard_link, lock_of_another_program, os.mkfifo, os.mkdir)
    for number, make in enumerate(made):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / LOCK)
        with pytest.raises(ValueError, match=rf"{number}/.lock is not the lock of a run; move it away, or choose"):
            RunFolder(folder)
    assert thesis.read_text() == "years of work" and not (tmp_path / "nowhere").exists()
    assert (tmp_path / "3" / LOCK).read_text() == "4711\n"


def test_a_killed_process_leaves_no_stale_lock(tmp_path):
    code = ASK.replace("except", "    print('held', flush=True); sys.stdin.read()\nexcept")
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert child.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=rf"is still alive \(process {child.pid} on "):
        RunFolder(tmp_path)
    child.kill()
    child.wait(60)
    RunFolder(tmp_path).close()


def test_a_process_that_a_killed_run_forked_does_not_keep_its_lock(tmp_path):
    fork = "    pid = os.fork()\n    print(pid, flush=True) if pid else time.sleep(600)\n    os.kill(os.getpid(), 9)\n"
    code = ("import os, time" + ASK).replace("except", fork + "except")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT) as killed:
        forked = int(killed.stdout.readline())
        killed.wait(60)
        try:
            RunFolder(tmp_path).close()
        finally:
            os.kill(forked, signal.SIGKILL)
