"""Copies that training does not touch, whatever order two streams run in; on a GPU, without waiting for it."""

from contextlib import contextmanager

import pytest
import tiny
import torch

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.run import host_copies
from fastgrpo.run.host_copies import HostCopies, pinned_like


def test_copies_are_the_runs_no_more():
    weight = torch.ones(3)
    tree = {"a": weight, "list": [weight, {"b": (torch.zeros(2), 5, "text")}]}
    copies = HostCopies()
    copy = copies.take(tree)
    copies.before_update()
    weight.zero_()
    copies.wait()
    assert torch.equal(copy["a"], torch.ones(3))
    assert copy["list"][1]["b"][1:] == (5, "text") and torch.equal(copy["list"][1]["b"][0], torch.zeros(2))


def test_a_tensor_that_occurs_twice_is_copied_once():
    weight, copies = torch.ones(3), HostCopies()
    first = copies.take({"embedding": weight, "head": weight.view(3), "other": weight[:2]})
    assert first["embedding"] is first["head"] is not first["other"]
    assert copies.take([weight])[0] is not first["embedding"]


class Device:
    """A GPU whose two streams run what they were told later, each as far as its events allow."""

    def __init__(self):
        self.main, self.side = Stream(), Stream()
        self.current = self.main

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def host_tensor(self, like):
        """Memory that a copy reaches when the stream of the copy gets there."""
        device, host = self, torch.full_like(like, torch.nan)

        class Pinned:
            def copy_(self, source, non_blocking):
                assert non_blocking
                device.current.queue.append(lambda: host.copy_(source))
                return host

        return Pinned()

    def run(self, first):
        streams = [first, self.main, self.side]
        while any(stream.queue for stream in streams):
            next(stream for stream in streams if stream.ready()).step()


class Stream:
    def __init__(self):
        self.queue = []

    def record_event(self):
        event = Event()
        self.queue.append(event.set)
        return event

    def wait_event(self, event):
        self.queue.append(event)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def ready(self):
        return self.queue and getattr(self.queue[0], "done", True)

    def step(self):
        task = self.queue.pop(0)
        if not isinstance(task, Event):
            task()


class Event:
    done = False

    def set(self):
        self.done = True

    def synchronize(self):
        assert self.done


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(host_copies, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(host_copies, "pinned_like", device.host_tensor)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: device.side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.main)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
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


def test_without_the_wait_a_stream_ahead_would_spoil_the_copy(device):
    weight, copies = torch.zeros(3), HostCopies()
    device.main.queue.append(lambda: weight.add_(1))
    (copy,) = copies.take([weight])
    device.main.queue.append(lambda: weight.add_(1))
    device.run(device.main)
    assert copy.unique().item() == 2


def test_what_is_copied_is_not_freed_before(device):
    copies = HostCopies()
    (copy,) = copies.take([torch.full((3,), 7.0)])
    device.run(device.side)
    copies.wait()
    assert copy.unique().item() == 7 and not copies._sources


def test_every_update_of_a_trainer_waits_for_the_copies(tmp_path, monkeypatch):
    rows = [{"prompt": "ab"}, {"prompt": "cd"}]
    args = GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, prompts_per_step=2, num_generations=2, max_completion_length=3
    )
    model = tiny.model(vocab_size=258)
    trainer = GRPOTrainer(
        model, lambda completions, **_: list(range(len(completions))), args, rows, processing_class=tiny.tokenizer()
    )
    weights, seen = model.lm_head.weight, []

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


def test_where_nothing_can_be_pinned_the_copy_is_made_all_the_same(monkeypatch, caplog):
    empty_like = torch.empty_like

    def refuse(tensor, **options):
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory\nmore of it")
        return empty_like(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", refuse)
    assert pinned_like(torch.ones(2, 3)).shape == (2, 3)
    assert "cannot be pinned, so a checkpoint makes the GPU wait (CUDA error: out of memory)" in caplog.text


@pytest.mark.gpu
def test_a_gpu_goes_on_while_it_is_copied():
    weight, busy = torch.ones(1 << 26, device="cuda"), torch.randn(8192, 8192, device="cuda")
    copies = HostCopies()
    copies.take([weight])
    copies.wait()  # the pinned block is there now
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
    finally:
        torch.cuda.set_sync_debug_mode("default")
