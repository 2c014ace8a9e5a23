"""Checks what the losses are given, and chooses the backend that runs them."""

import logging
from functools import cache
from importlib.util import find_spec

import torch

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
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap must be positive, got {logit_softcap}")
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
    if targets.shape != like.shape[:-1]:
        raise ValueError(f"targets must be {tuple(like.shape[:-1])} like {name}, got {tuple(targets.shape)}")
    if targets.device != like.device:
        raise ValueError(f"targets must be on {like.device} like {name}, got {targets.device}")
    if targets.is_floating_point():
        raise ValueError(f"targets must be integers, got {targets.dtype}")


def check_targets(targets: torch.Tensor, vocab_size: int) -> None:
    """Check that the targets of active rows are in the vocabulary, unless the host would have to wait for a GPU.

    On a GPU the kernels return NaN for a bad target, and under torch's anomaly mode the device asserts that there is
    none. A compiled graph cannot raise, so nothing is checked inside of one.

    Args:
        targets: [M] token ids of the active rows.
        vocab_size: V.

    Raises:
        ValueError: A target on the CPU lies outside [0, V).
    """
    if not targets.numel() or torch.compiler.is_compiling():
        return
    if targets.device.type == "cpu":
        low, high = targets.min().item(), targets.max().item()
        if low < 0 or high >= vocab_size:
            raise ValueError(f"targets must be in [0, {vocab_size}) on active rows, got {low} to {high}")
    elif torch.is_anomaly_enabled():
        assert_targets(targets, vocab_size)


def assert_targets(targets: torch.Tensor, vocab_size: int) -> None:
    """Let the device assert that targets are in the vocabulary. The host does not wait, so a later call raises.

    Args:
        targets: [M] token ids.
        vocab_size: V.
    """
    legal = (targets >= 0) & (targets < vocab_size)
    torch._assert_async(legal.all(), f"targets must be in [0, {vocab_size}) on active rows")


def choose_backend(backend: str, **tensors: torch.Tensor) -> str:
    """Choose the code path of a loss.

    Args:
        backend: "auto", "chunked" or "triton".
        tensors: The inputs that the kernels would read, by the names that errors call them.

    Returns:
        "chunked" or "triton".

    Raises:
        ValueError: The backend is unknown, or "triton" was asked for and cannot run on these tensors.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        one_dtype = len({t.dtype for t in tensors.values()}) == 1
        fits = HAS_TRITON and one_dtype and all(_fits(tensor) for tensor in tensors.values())
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

    Args:
        compact: None, or "sync" where the caller accepts the wait.
        backend: "chunked" or "triton".
        tokens: Any tensor on the device of the tokens.

    Returns:
        Whether to leave these rows out.

    Raises:
        ValueError: `compact` is neither None nor "sync".
    """
    if compact not in (None, "sync"):
        raise ValueError(f"compact must be None or 'sync', got {compact!r}")
    return compact == "sync" or backend == "chunked" or tokens.device.type == "cpu"


@cache
def _log_choice(backend):
    logger.info("backend='auto' runs the %s path", backend)


def _fits(tensor):
    """Whether the Triton kernels take a tensor of this device and dtype."""
    return tensor.is_cuda and tensor.dtype in launch.DTYPES and launch.runs_on(tensor.device)
