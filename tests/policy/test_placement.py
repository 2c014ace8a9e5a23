"""Where a model goes and in which precision, and that a cast leaves what has to stay exact."""

import pytest
import tiny
import torch

from fastgrpo.policy.device import cast, choose_device, choose_dtype


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch see this many GPUs."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


@pytest.mark.parametrize(
    "count, name, device",
    [(0, "auto", "cpu"), (0, "cpu", "cpu"), (2, "auto", "cuda"), (2, "cuda:1", "cuda:1"), (2, "cpu", "cpu")],
)
def test_auto_is_the_gpu_where_there_is_one(gpus, count, name, device):
    gpus(count)
    assert choose_device(name) == torch.device(device)


@pytest.mark.parametrize(
    "count, name, match",
    [
        (0, "cuda", "torch sees no CUDA device; use cpu"),
        (2, "cuda:2", r"torch sees 2 CUDA device\(s\)"),
        (2, "gpu", "device must be cuda, cuda:N, cpu or auto, got 'gpu'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(gpus, count, name, match):
    gpus(count)
    with pytest.raises(ValueError, match=match):
        choose_device(name)


def test_auto_is_bf16_on_a_gpu_and_fp32_on_a_cpu():
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    assert choose_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


def test_a_cast_leaves_the_rotary_frequencies_exact():
    model = tiny.model()
    frequencies = model.model.rotary_emb.inv_freq.clone()
    cast(model, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
