"""Notes name the ranks that are to blame, and never hold up the end of a run."""

import json
import os
import threading

import pytest
import torch.distributed as dist

from fastgrpo.ranks import notes
from fastgrpo.ranks.notes import Notes


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(notes, "PATIENCE", 0.2)


def some(count, store=None):
    store = store or dist.HashStore()
    return [Notes(store, rank, count) for rank in range(count)]


def test_a_rank_that_failed_is_to_blame_before_all_others(impatient):
    first, second, third = some(3)
    first.enter("the rewards")
    second.fail("KeyError: 'x'")
    assert list(first.missing()) == [1] and first.missing()[1].failed == "KeyError: 'x'"
    assert list(third.missing()) == [1]


def test_then_a_rank_whose_process_has_ended(impatient):
    first, second, third = some(3)
    for each in (first, second, third):
        each.enter("the rewards")
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked for its exit code
    third.process[1] = pid
    third.enter("the gradients")
    for _ in range(2):
        assert list(first.missing()) == [2] and first.missing()[2].dead and first.missing()[2].what == "the gradients"
        if pid:
            os.waitpid(pid, 0)
            pid = 0


def test_then_those_that_miss_nobody_and_have_not_come_so_far(impatient):
    first, second, third, fourth = some(4)
    for each in (first, second, fourth):
        each.enter("the rewards")
    second.lose()
    assert list(first.missing()) == [2] and first.missing()[2].what == "the start"
    third.enter("the rewards")
    assert list(first.missing()) == [2, 3]
    fourth.lose()
    assert list(first.missing()) == [2]


def test_a_store_that_is_gone_is_no_error_and_no_wait(impatient):
    class Broken(dist.HashStore):
        def set(self, key, value):
            raise dist.DistNetworkError("Broken pipe")

    class Silent(dist.HashStore):
        def check(self, keys):
            threading.Event().wait()

    broken = Notes(Broken(), 0, 2)
    broken.enter("the rewards")
    broken.fail("it")
    assert broken.missing() is None
    silent = Notes(Silent(), 1, 2)
    assert silent.missing() is None and not silent.said_by_lead("it")


def test_an_error_of_rank_0_is_said_by_rank_0_alone(impatient):
    first, second = some(2)
    first.fail("no such model")
    assert second.said_by_lead("no such model") and not second.said_by_lead("another")
    assert not first.said_by_lead("no such model")


def test_no_rank_waits_for_a_rank_0_that_got_further(monkeypatch):
    monkeypatch.setattr(notes, "PATIENCE", 1e9)
    first, second = some(2)
    second.enter("the rewards")
    for what in ("the rewards", "the gradients"):
        first.enter(what)
    assert not second.said_by_lead("no such model")


def test_the_place_is_that_of_the_last_exchange():
    store = dist.HashStore()
    (alone,) = some(1, store)
    alone.enter("the rewards")
    alone.enter("the gradients")
    assert json.loads(store.get("place/0"))[:2] == [2, "the gradients"]
    Notes(None, 0, 1).enter("anything")


def test_an_error_that_did_not_end_a_rank_is_forgotten(impatient):
    first, second = some(2)
    second.fail("no such model")
    assert first.missing()[1].failed == "no such model"
    second.enter("the rewards of another run")
    assert first.missing()[1].failed is None


def test_the_run_ends_for_the_first_cause_that_was_noted():
    first, second = some(2)
    assert first.end_of_all({}) is None
    second.end_all("rank 1 failed: no such model")
    first.end_all("rank 0 failed: another")
    assert first.end_of_all({}) == second.end_of_all({}) == "rank 1 failed: no such model"
    with pytest.raises(RuntimeError, match="the store is gone"):
        Notes(None, 0, 2).end_of_all({})


def test_a_process_that_ended_without_leaving_ends_the_run():
    first, second, third = some(3)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    second.leave()
    assert first.end_of_all({1: pid}) is None  # it had nothing left to do
    third.process[1] = pid
    third.enter("the gradients")
    assert first.end_of_all({1: pid, 2: pid}) == "rank 2 died; it was last at the gradients"
    assert second.end_of_all({}) == "rank 2 died; it was last at the gradients"  # also on another machine


def test_a_process_that_is_about_to_end_is_waited_for(monkeypatch):
    """Who waits in vain may know of it a moment before the process has ended."""
    first, second = some(2)
    second.enter("the rewards")
    ended = iter([False, False, True])
    monkeypatch.setattr(notes, "_has_ended", lambda pid: next(ended))
    assert not first.missing(late=True)[1].dead  # it may be alive
    assert first.missing()[1].dead
