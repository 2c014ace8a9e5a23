"""Checks the head and the targets that the losses are given, and chooses the backend that runs them."""

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch

from fastgrpo.loss.interval import BACKWARD_TOLERANCE
from fastgrpo.loss.objective import POSITIVE, Objective
from fastgrpo.loss.values import check_number, check_tensor

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    from fastgrpo.kernels import launch

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "chunked", "triton")


def check_head(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, logit_softcap: float | None,
    targets: torch.Tensor,
) -> None:  # fmt: skip
    """Check that hidden states, head and targets fit each other.

    Args:
        hidden: [..., D] floating point.
        weight: [V, D] floating point.
        bias: [V] or None.
        logit_softcap: The cap of the logits, or None.
        targets: [...] integers.

    Raises:
        ValueError: A shape, dtype or device does not fit, or the soft-cap is not positive.
    """
    if logit_softcap is not None:
        check_number(logit_softcap, "logit_softcap", POSITIVE)
    check_tensor(hidden, "hidden", "floating point")
    check_tensor(weight, "weight", "floating point", hidden, "hidden")
    if bias is not None:
        check_tensor(bias, "bias", "floating point", hidden, "hidden")
    if hidden.ndim < 1:
        raise ValueError("hidden must be [..., D], got a single number")
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight must be [V, D] with D={hidden.shape[-1]} of hidden {tuple(hidden.shape)}, got "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V]={tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    check_token_ids(targets, hidden, "hidden")


def check_token_ids(targets: torch.Tensor, like: torch.Tensor, name: str) -> None:
    """Check that targets are integers, one for each row of hidden states or logits.

    Args:
        targets: [...] token ids.
        like: [..., D] hidden states or [..., V] logits.
        name: What `like` is called in the error.

    Raises:
        ValueError: The shape, the device or the dtype does not fit.
    """
    check_tensor(targets, "targets", "integers", like, name)
    if targets.shape != like.shape[:-1]:
        raise ValueError(f"targets must be {tuple(like.shape[:-1])} like {name}, got {tuple(targets.shape)}")


def choose_backend(backend: str, chunked_alone: Sequence[str] = (), **tensors: torch.Tensor) -> str:
    """Choose the code path of a loss."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if HAS_TRITON:
        dtypes = launch.HEAD_DTYPES if "weight" in tensors else launch.DTYPES
    if backend == "auto":
        one_dtype = len({t.dtype for t in tensors.values()}) == 1
        fits = HAS_TRITON and not chunked_alone and one_dtype and all(_fits(t, dtypes) for t in tensors.values())
        backend = "triton" if fits else "chunked"
        if not torch.compiler.is_compiling():
            _log_choice(backend, f", the only one that computes {chunked_alone[0]}" if chunked_alone else "")
    elif backend == "triton":
        if chunked_alone:
            raise ValueError(
                f"backend='triton' does not compute {chunked_alone[0]}; use backend='auto' or backend='chunked'"
            )
        if not HAS_TRITON:
            raise ValueError("backend='triton' needs Triton (pip install triton, Linux); use backend='chunked'")
        dtypes = {t.dtype for t in tensors.values()}
        if len(dtypes) > 1:
            raise ValueError(f"backend='triton' needs {' and '.join(tensors)} of one dtype, got {dtypes}")
        for name, tensor in tensors.items():
            launch.check_device(tensor, name, dtypes)
    return backend


def check_backward_tolerance(tolerance: float, objective: Objective | None = None) -> None:
    """Check how much of a row's gradient may be left out."""
    check_number(tolerance, "backward_tolerance", BACKWARD_TOLERANCE)
    if tolerance == 0 or objective is None:
        return
    for what, there in (
        (f"entropy_coef={objective.entropy_coef}", objective.entropy_coef != 0),
        ("kl='full'", objective.full_kl and objective.beta != 0),
    ):
        if there:
            raise ValueError(
                f"backward_tolerance={tolerance} bounds the gradient of log-probs, and {what} has a gradient of its "
                "own on every column of the vocabulary; pass backward_tolerance=0"
            )


def cast_for_autocast(backend: str, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast hidden states and head to the dtype of torch.autocast where it is on, as nn.Linear would.

    Args:
        backend: As the caller gave it. The chunked path computes in fp32 anyway, so it takes the tensors as they are.
        hidden: [..., D].
        weight: [V, D].

    Returns:
        (hidden, weight), unchanged where autocast is off or one of them is fp64.
    """
    device = hidden.device.type
    if backend == "chunked" or (backend == "auto" and not hidden.is_cuda):
        return hidden, weight
    if not torch.is_autocast_enabled(device) or torch.float64 in (hidden.dtype, weight.dtype):
        return hidden, weight
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype)


def compacts(compact: str | None, backend: str, tokens: torch.Tensor) -> bool:
    """Tell whether the host shall find out which rows carry gradient, so that the others can be left out.

    On the CPU this is free. On a GPU the host must wait for the device.
    """
    if compact not in (None, "sync"):
        raise ValueError(f"compact must be None or 'sync', got {compact!r}")
    return compact == "sync" or backend == "chunked" or tokens.device.type == "cpu"


@cache
def _log_choice(backend, why):
    logger.info("backend='auto' runs the %s path%s", backend, why)


def _fits(tensor, dtypes):
    """Whether the Triton kernels take a tensor of this device and dtype."""
    return tensor.is_cuda and tensor.dtype in dtypes and launch.runs_on(tensor.device)
