"""What reward models of all kinds share: batches of similar lengths, and devices."""

import random

import pytest
import torch

from fastgrpo.rewards.models import by_length, same_device


@pytest.mark.parametrize("budget", [1, 7, 64, 10_000])
def test_batches_hold_every_text_once_and_keep_to_their_budget(budget):
    generator = random.Random(budget)
    lengths = [generator.randint(1, 40) for _ in range(50)]
    batches = by_length(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(50))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
    flat = [lengths[i] for batch in batches for i in batch]
    assert flat == sorted(lengths, reverse=True)  # so a batch holds texts of similar lengths


def test_batches_by_hand():
    assert by_length([5, 1, 4, 2, 2], 10) == [[0, 2], [3, 4, 1]]
    assert by_length([], 10) == []
    assert by_length([99, 3, 3, 3], 9) == [[0], [1, 2, 3]]


def test_devices_are_one_whatever_their_spelling(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    device = torch.device
    assert same_device(device("cpu"), device("cpu")) and not same_device(device("cpu"), device("cuda:0"))
    assert same_device(device("cuda"), device("cuda:1")) and not same_device(device("cuda"), device("cuda:0"))
    assert same_device(device("cuda:0"), device("cuda:0")) and not same_device(device("cuda:0"), device("cuda:1"))
