"""Copies that training does not touch, whatever order two streams run in; on a GPU, without waiting for it."""

import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from runs import make_trainer

from fastgrpo.run import snapshot
from fastgrpo.run.snapshot import HostCopies


class Device:
    """A GPU whose two streams run what they were told later, each as far as its events allow."""

    def __init__(self):
        self.main, self.side = Stream(), Stream()
        self.current, self.sources, self.pinned = self.main, [], 0

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def host_tensor(self, like):
        device, host = self, torch.full_like(like, torch.nan)
        self.pinned += 1

        def copy(source, non_blocking):
            assert non_blocking
            kept = weakref.ref(source)  # a stream keeps nothing alive
            device.sources.append(kept)
            device.current.queue.append(lambda: host.copy_(kept()))
            return host

        return SimpleNamespace(copy_=copy)

    def run(self, first):
        while self.main.queue or self.side.queue:
            assert any(stream.step() for stream in (first, self.main, self.side)), "each waits for the other"


class Event(threading.Event):
    def synchronize(self):
        assert self.is_set()


class Stream:
    """A queue of tasks. One that returns False has to wait."""

    def __init__(self):
        self.queue = []

    def record_event(self):
        event = Event()
        self.queue.append(event.set)
        return event

    def wait_event(self, event):
        self.queue.append(event.is_set)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def step(self):
        if not self.queue or self.queue[0]() is False:
            return False
        del self.queue[0]
        return True


@pytest.fixture
def device(monkeypatch):
    device = Device()
    for owner, name, stand_in in (
        (snapshot, "on_gpu", lambda tensor: True), (snapshot, "pinned_like", device.host_tensor),
        (torch.cuda, "Stream", lambda _: device.side), (torch.cuda, "current_stream", lambda _: device.main),
        (torch.cuda, "stream", device.stream),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, stand_in)
    return device


@pytest.mark.parametrize("first", ["main", "side"])
def test_a_copy_is_of_one_step_whichever_stream_is_ahead(device, first):
    weights, copies, taken = [torch.zeros(3), torch.zeros(2)], HostCopies(), []
    for _ in range(3):
        copies.before_update()
        device.main.queue += [lambda weight=weight: weight.add_(1) for weight in weights]
        taken.append(copies.take(weights))
    device.run(getattr(device, first))
    copies.wait()
    assert [[copy.unique().item() for copy in step] for step in taken] == [[1, 1], [2, 2], [3, 3]]


def test_what_is_copied_is_not_freed_before(device):
    copies = HostCopies()
    (copy,) = copies.take([torch.full((3,), 7.0)])
    (source,) = device.sources
    assert source() is not None
    device.run(device.side)
    copies.wait()
    assert copy.unique().item() == 7 and source() is None


def test_memory_is_pinned_once_and_lent_only_when_it_is_free(device):
    copies = HostCopies()

    def take(*values):
        copy = copies.take([torch.full((3,), value) for value in values])
        device.run(device.side)
        copies.wait()
        return copy

    first = take(1.0, 2.0)
    second = take(3.0, 4.0)  # the first is still being read
    assert [copy[0].item() for copy in first + second] == [1, 2, 3, 4] and device.pinned == 4
    copies.release()
    third = take(5.0, 6.0)
    assert {id(copy) for copy in third} == {id(copy) for copy in second} and device.pinned == 4
    assert [copy[0].item() for copy in first + third] == [1, 2, 5, 6]


def test_every_update_of_a_trainer_waits_for_the_copies(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, lambda completions, **_: list(range(len(completions))))
    weights, seen = trainer.model.lm_head.weight, []

    class Current:
        def wait_event(self, event):
            seen.append((event, torch.equal(weights, before)))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Current())
    for step in range(2):
        before = weights.detach().clone()
        trainer.copies._copied = {torch.device("cuda"): step}
        trainer.step()
        assert not torch.equal(weights, before)
    assert seen == [(0, True), (1, True)]


@pytest.mark.gpu
def test_a_gpu_goes_on_while_it_is_copied():
    weight, busy = torch.ones(1 << 26, device="cuda"), torch.randn(8192, 8192, device="cuda")
    copies = HostCopies()
    copies.take([weight])
    copies.wait()
    copies.release()  # the pinned block is there now
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(2, 5):
            for _ in range(5):
                busy = busy @ busy
            copies.before_update()
            weight.fill_(step)
            (copy,) = copies.take([weight])
            copies.before_update()
            weight.fill_(-1.0)
            copies.wait()
            assert copy.is_pinned() and copy.min().item() == copy.max().item() == step
            copies.release()
    finally:
        torch.cuda.set_sync_debug_mode("default")
