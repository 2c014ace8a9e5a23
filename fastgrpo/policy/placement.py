"""Where a model is and in which precision: the device and the dtype that settings name."""

import torch
from transformers import PreTrainedModel


def choose_device(name: str = "auto", setting: str = "device") -> torch.device:
    """Find the device that a setting names."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{setting} must be cuda, cuda:N, cpu or auto, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{setting}={name!r} was asked for, but torch sees no CUDA device; use --{setting} cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{setting}={name!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA device(s)")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Find the dtype that a setting names.

    Args:
        name: float32, bfloat16, or auto: bf16 on GPUs, where the optimizer keeps fp32 masters, and fp32 on CPUs.
        device: Where the weights will be.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the parameters of a model but not its buffers: rotary frequencies in bf16 would be wrong by radians."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
