"""Copies to a GPU go through pinned memory; a tensor that stays where it is is not copied at all."""

import pytest
import torch

from fastgrpo.loss.inputs import staged, to_device


@pytest.fixture
def calls(monkeypatch):
    """What a copy to a GPU asks of torch, in order."""
    calls = []

    def pin_memory(tensor):
        assert tensor.is_contiguous()
        calls.append("pin")
        return tensor

    def to(tensor, device, non_blocking=False):
        calls.append((str(device), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return calls


@pytest.mark.parametrize("value", [torch.arange(6), torch.arange(6).view(2, 3).T, torch.ones(1).expand(4)])
def test_a_copy_to_a_gpu_goes_through_pinned_memory(calls, value):
    assert torch.equal(to_device(value, "cuda:0"), value)
    assert calls == ["pin", ("cuda:0", True)]


def test_nothing_else_is_pinned(calls):
    value, elsewhere = torch.arange(6), torch.empty(2, device="meta")
    assert staged(value, "cpu") is value and staged(elsewhere, "cuda") is elsewhere
    assert not calls


def test_on_the_host_the_tensor_stays_what_it_is():
    value = torch.arange(6)
    assert to_device(value, torch.device("cpu")) is value


@pytest.mark.gpu
def test_the_pinned_block_lives_until_it_is_copied():
    """The stream is busy while the host gives out block after block of the same size."""
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(10):
        busy = busy @ busy
    copies = [to_device(torch.full((1 << 20,), float(i)), "cuda") for i in range(50)]
    assert [copy.unique().tolist() for copy in copies] == [[float(i)] for i in range(50)]
    assert staged(torch.ones(3), "cuda").is_pinned()
