"""What the losses accept, and which backend runs them."""

import logging
from functools import cache
from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    from fastgrpo.kernels import launch


logger = logging.getLogger(__name__)


BACKENDS = ("auto", "chunked", "triton")


TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _check_head(hidden, weight, bias, softcap, targets):
    if softcap is not None and not softcap > 0:
        raise ValueError(f"logit_softcap must be positive, got {softcap}")
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight must be [V, D] with D={hidden.shape[-1]} of hidden {tuple(hidden.shape)}, got "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V]={tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    for name, value in (("hidden", hidden), ("weight", weight)):
        if not value.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {value.dtype}")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.device != hidden.device:
            raise ValueError(f"{name} must be on {hidden.device} like hidden, got {value.device}")
    _check_token_ids(targets, hidden, "hidden")


def _check_token_ids(targets, like, name):
    if targets.shape != like.shape[:-1]:
        raise ValueError(f"targets must be {tuple(like.shape[:-1])} like {name}, got {tuple(targets.shape)}")
    if targets.device != like.device:
        raise ValueError(f"targets must be on {like.device} like {name}, got {targets.device}")
    if targets.is_floating_point():
        raise ValueError(f"targets must be integers, got {targets.dtype}")


def _check_targets(targets, vocab_size):
    """A ValueError on the CPU. A look at GPU memory would stall: there the row is NaN, and in torch's anomaly
    mode the device asserts. Nothing inside of a compiled graph, which cannot raise.
    """
    if not targets.numel() or torch.compiler.is_compiling():
        return
    if targets.device.type == "cpu":
        low, high = targets.min().item(), targets.max().item()
        if low < 0 or high >= vocab_size:
            raise ValueError(f"targets must be in [0, {vocab_size}) on active rows, got {low} to {high}")
    elif torch.is_anomaly_enabled():
        _assert_targets(targets, vocab_size)


def _assert_targets(targets, vocab_size):
    """Without a wait: what fails is the device's queue, at its next look."""
    legal = (targets >= 0) & (targets < vocab_size)
    torch._assert_async(legal.all(), f"targets must be in [0, {vocab_size}) on active rows")


def _choose_backend(backend, **tensors):
    """ "chunked" or "triton"; what was asked for and cannot be had is a ValueError."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        fits = all(t.is_cuda and t.dtype in TRITON_DTYPES for t in tensors.values())
        one_dtype = len({t.dtype for t in tensors.values()}) == 1
        fits = fits and one_dtype and HAS_TRITON and all(launch.runs_on(t.device) for t in tensors.values())
        backend = "triton" if fits else "chunked"
        if not torch.compiler.is_compiling():
            _log_choice(backend)
    elif backend == "triton":
        if not HAS_TRITON:
            raise ValueError("backend='triton' needs Triton (pip install triton, Linux); use backend='chunked'")
        dtypes = {t.dtype for t in tensors.values()}
        if len(dtypes) > 1:
            raise ValueError(f"backend='triton' needs {' and '.join(tensors)} of one dtype, got {dtypes}")
        for name, tensor in tensors.items():
            launch.check_device(tensor, name)
    return backend


def _autocast(backend, hidden, weight):
    """Both in autocast's dtype where it is on, as nn.Linear would have them; the chunked path is fp32 anyway."""
    device = hidden.device.type
    if backend == "chunked" or (backend == "auto" and not hidden.is_cuda):
        return hidden, weight
    if not torch.is_autocast_enabled(device) or torch.float64 in (hidden.dtype, weight.dtype):
        return hidden, weight
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype)


def _compacts(compact, backend, tokens):
    """Whether the host is to learn which rows carry gradient: free on the CPU."""
    if compact not in (None, "sync"):
        raise ValueError(f"compact must be None or 'sync', got {compact!r}")
    return compact == "sync" or backend == "chunked" or tokens.device.type == "cpu"


@cache
def _log_choice(backend):
    logger.info("backend='auto' runs the %s path", backend)
