"""Ranks find each other, and only those of the same attempt."""

import threading

import pytest
import torch.distributed as dist

from fastgrpo import chat, train
from fastgrpo.ranks import ALONE, RankLost, _attempt, join, launched, refuse_ranks

LAUNCHER = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def launcher(monkeypatch):
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def all__attempt(store, size):
    """Let ranks meet, each in a thread, and return what each of them got."""
    names = {}
    threads = [
        threading.Thread(target=lambda rank=rank: names.update({rank: _attempt(store, rank, size, 30)}))
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [names.get(rank) for rank in range(size)]


def test_each_attempt_has_a_name_that_all_its_ranks_know():
    store = dist.HashStore()
    first, second = all__attempt(store, 3), all__attempt(store, 3)
    assert len(set(first)) == len(set(second)) == 1 and None not in first + second and first != second


def test_who_does_not_start_is_named():
    store = dist.HashStore()
    all__attempt(store, 3)  # an earlier attempt says nothing of this one
    with pytest.raises(
        RankLost, match=r"^rank 0 stops while it waits for all 3 ranks to start: rank 1, 2 did not come$"
    ):
        _attempt(store, 0, 3, 0.1)
    with pytest.raises(RankLost, match=r"^rank 2 stops while it waits for all 3 ranks to start: rank 0 did not come$"):
        _attempt(store, 2, 3, 0.1)


def test_who_finds_nobody_to_meet_says_where_it_looked(launcher):
    told = r"^rank 1 stops while it waits for all 2 ranks to start: .*127\.0\.0\.1, 1\)"
    with pytest.raises(RankLost, match=told):
        join("cpu", 0.2)


def test_without_a_launcher_a_process_is_alone(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert not launched() and join("cpu") is ALONE
    refuse_ranks("chat")


def test_what_one_process_does_is_refused(launcher):
    with pytest.raises(ValueError, match=r"^chat runs in one process: start it without torchrun"):
        refuse_ranks("chat")


@pytest.mark.parametrize(
    "command, argv",
    [
        (chat.chat, ["model"]),
        (train.train, ["--sweep", "learning_rate=1e-3,1e-4"]),
        (train.train, ["--sweep_seeds", "2"]),
    ],
)
def test_commands_of_one_process_are_refused_before_they_begin(launcher, command, argv):
    with pytest.raises(ValueError, match="runs in one process: start it without torchrun"):
        command(argv)
