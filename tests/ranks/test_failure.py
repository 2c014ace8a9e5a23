"""An error that ends a rank reaches the user, the other ranks and torchrun."""

import json
import re
import sys

import pytest
import torch.distributed as dist
from paths import ROOT
from ranks import start

from fastgrpo.ranks import RankLost, Ranks, failure
from fastgrpo.ranks.failure import CONSEQUENCE, end, install


@pytest.fixture
def error_file(tmp_path, monkeypatch):
    monkeypatch.setattr(failure, "_left", False)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def read():
        message = json.loads((tmp_path / "error.json").read_text())["message"]
        return message["message"], message["extraInfo"]["py_callstack"], int(message["extraInfo"]["timestamp"])

    return read


def ranks(rank=0):
    return Ranks(rank, 2, store=dist.HashStore())


def test_an_error_of_its_own(error_file, capsys):
    failed = ranks()
    assert not failure.left()
    end(ValueError("no such model: x\nsecond line"), failed.notes, "no such model: x\nsecond line")
    assert capsys.readouterr().err == "error on rank 0: no such model: x\nsecond line\n" and failure.left()
    assert error_file() == ("ValueError: no such model: x", "no such model: x\nsecond line", 1000)
    assert failed.store.get("failed/0") == b"ValueError: no such model: x"
    assert failed.store.get("end") == b"rank 0 failed: ValueError: no such model: x"


@pytest.mark.parametrize("hung, later", [(False, CONSEQUENCE), (True, 0)])
def test_a_lost_rank_is_a_consequence_unless_nobody_else_has_an_error(error_file, capsys, hung, later):
    lost = ranks()
    end(RankLost("rank 0 stops while it waits for x: rank 1 died", hung), lost.notes, "a traceback")
    assert capsys.readouterr().err == "rank 0 stops while it waits for x: rank 1 died\n"
    assert error_file()[2] == 1000 + later and not lost.store.check(["failed/0"])


def test_an_error_that_rank_0_has_too_is_said_once(error_file, capsys):
    second = ranks(1)
    second.store.set("failed/0", "ValueError: no such model")
    end(ValueError("no such model"), second.notes, "no such model")
    assert capsys.readouterr().err == "" and error_file()[0] == "ValueError: no such model"


def test_an_exception_that_nobody_catches_ends_a_rank_alike(error_file, capsys, monkeypatch):
    interrupted = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: interrupted.append(args[0]))
    for rank in (0, 1):
        install(ranks(rank))
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert interrupted == [KeyboardInterrupt]  # rank 0 alone shows it
    try:
        raise KeyError("a bug")
    except KeyError as error:
        install(ranks())
        sys.excepthook(KeyError, error, error.__traceback__)
    told = capsys.readouterr().err
    assert told.startswith("error on rank 0:\nTraceback (most recent call last):\n") and "KeyError: 'a bug'" in told


def test_a_hook_of_somebody_elses_hears_of_the_error_too(error_file, capsys, monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: heard.append(args))
    install(ranks())
    error = KeyError("a bug")
    sys.excepthook(KeyError, error, None)
    assert heard == [(KeyError, error, None)] and capsys.readouterr().err.count("KeyError: 'a bug'") == 1


def test_hooks_that_would_say_the_same_once_more_are_not_called(error_file, capsys, monkeypatch):
    """That of Python, and that of torch's process groups, which calls it."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert sys.excepthook is not sys.__excepthook__
        install(ranks())
        sys.excepthook(KeyError, KeyError("a bug"), None)
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().err.count("KeyError: 'a bug'") == 1


def test_without_torchrun_there_is_no_file(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    end(ValueError("it"), ranks().notes, "it")
    assert capsys.readouterr().err == "error on rank 0: it\n"


@pytest.mark.parametrize(
    "ending, rank, why",
    [
        ("fail", "1", "KeyError: 'a bug"),
        pytest.param("die", "1", "Signal 9 (SIGKILL)", marks=pytest.mark.slow),
        pytest.param(
            "hang", "[02]", "rank 1 did not come in time; it was last at the first in", marks=pytest.mark.slow
        ),
    ],
)
def test_torchrun_names_the_right_rank_as_the_root_of_all(ending, rank, why):
    with start([ROOT / "tests" / "support" / "lost_ranks.py", ending, "gather"], count=3) as job:
        assert job.wait() == 1
        root = job.launcher().partition("Root Cause")[2]
        assert re.search(rf"rank +: {rank} ", root) and why in root, job.told()
