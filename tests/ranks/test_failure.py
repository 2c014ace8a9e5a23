"""An error that ends a rank reaches the user, the other ranks and torchrun."""

import json
import re
import sys

import pytest
import torch.distributed as dist
from paths import ROOT
from ranks import start

from fastgrpo import ranks as module
from fastgrpo.ranks import RankLost, Ranks, end

PLAIN_HOOK = sys.__excepthook__


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(module, "_failed", False)
    return dist.HashStore()


@pytest.fixture
def be(monkeypatch, store, tmp_path):
    """Become a rank whose launcher is torchrun. Returns a function that reads the error file."""

    def become(rank):
        monkeypatch.setattr(module, "_joined", Ranks(rank, 2, store=store))
        path = tmp_path / f"error-{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        return lambda: json.loads(path.read_text())["message"] if path.exists() else None

    return become


def test_an_error_is_reported_to_the_user_the_ranks_and_torchrun(be, store, capsys):
    error_file = be(0)
    end(ValueError("no such model: x\nsecond line"), "no such model: x\nsecond line")
    assert capsys.readouterr().err == "error on rank 0: no such model: x\nsecond line\n"
    message = error_file()
    assert message["message"] == "ValueError: no such model: x"
    assert message["extraInfo"]["py_callstack"] == "no such model: x\nsecond line"
    assert json.loads(store.get("cause")) == [0, "ValueError: no such model: x"]


@pytest.mark.parametrize("is_root", [False, True])
def test_a_lost_rank_is_one_line_and_no_root_cause_unless_no_rank_has_an_error(be, store, capsys, is_root):
    error_file = be(0)
    end(RankLost("rank 0 stops while it waits for x: rank 1 died", is_root), "a traceback")
    assert capsys.readouterr().err == "rank 0 stops while it waits for x: rank 1 died\n"
    assert (error_file() is not None) == is_root and not store.check(["cause"])


def test_an_error_that_several_ranks_have_is_printed_once(be, capsys):
    for rank, told in ((1, "error on rank 1: no such model\n"), (0, "")):
        be(rank)
        end(ValueError("no such model"), "no such model")
        assert capsys.readouterr().err == told
    end(ValueError("another"), "another")
    assert capsys.readouterr().err == "error on rank 0: another\n"


def test_an_exception_that_nobody_catches_ends_a_rank_alike(be, capsys):
    interrupted = []
    for rank in (0, 1):
        be(rank)
        hook = module._end_by(lambda *args: interrupted.append(args[0]), lead=rank == 0)
        hook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert interrupted == [KeyboardInterrupt]  # only rank 0 shows it
    try:
        raise KeyError("a bug")
    except KeyError as error:
        be(0)
        module._end_by(PLAIN_HOOK, lead=True)(KeyError, error, error.__traceback__)
    told = capsys.readouterr().err
    assert told.startswith("error on rank 0:\nTraceback (most recent call last):\n")
    assert told.count("KeyError: 'a bug'") == 1


def test_a_hook_of_the_user_gets_the_error_too(be, capsys):
    heard, error = [], KeyError("a bug")
    be(0)
    module._end_by(lambda *args: heard.append(args), lead=True)(KeyError, error, None)
    assert heard == [(KeyError, error, None)] and capsys.readouterr().err.count("KeyError: 'a bug'") == 1


def test_the_hook_of_a_process_group_does_not_print_the_error_again(be, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", PLAIN_HOOK)
    be(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert sys.excepthook is not PLAIN_HOOK
        module._end_by(sys.excepthook, lead=True)(KeyError, KeyError("a bug"), None)
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().err.count("KeyError: 'a bug'") == 1


@pytest.mark.parametrize(
    "ending, rank, why",
    [
        ("fail", "1", "KeyError: 'a bug"),
        pytest.param("die", "1", "Signal 9 (SIGKILL)", marks=pytest.mark.slow),
        pytest.param("hang", "[02]", "rank 1 died or did not come in time", marks=pytest.mark.slow),
    ],
)
def test_torchrun_names_the_right_rank_as_the_root_of_all(ending, rank, why):
    with start([ROOT / "tests" / "support" / "lost_ranks.py", ending, "gather"], count=3) as job:
        assert job.wait() == 1
        root = job.launcher().partition("Root Cause")[2]
        assert re.search(rf"rank +: {rank} ", root) and why in root, job.told()
