"""Chooses the backend of a loss, and checks the first use of each kernel.

`select` chooses between a kernel and its plain PyTorch twin. Tests cannot cover every GPU, driver and compiler. So each
variant of a kernel (dtype, options, shape of the head) is compared with plain PyTorch on the first rows of its first
call. If it does not compile, does not fit the GPU, or disagrees, a warning is logged once, and plain PyTorch is used
from then on. The environment variable FASTGRPO_SELF_CHECK sets this check: 1 (default on GPUs), 0 (off), or raise (an
error instead of the warning). In Triton's interpreter, on a CPU, the default is 0.

The gradients of weight and bias are not compared. They are PyTorch's own products of the same exponentials as the
gradient of the hidden states, which is compared.

Shapes: N rows of hidden states, logits or log-probs (tokens), M <= N kept ones, m rows of the sample.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from fastgrpo.kernels.objectives import PolicyRows, kernel_knobs, needed
from fastgrpo.loss.objective import Objective

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    from fastgrpo.kernels import launch

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "chunked", "triton")
VARIABLE = "FASTGRPO_SELF_CHECK"
ROWS, MOST_ROWS = 256, 4096  # rows of a sample; its maximum if it must hold whole sequences
# Tolerances: absolute and relative for log-probs and entropies, and relative to the norm for gradients. Rounding
# exps to bf16 changes a gradient by 2e-3 of its norm, and rounding the gradient itself by as much again.
VALUES, GRADIENTS = 5e-4, 1e-2
TF32 = 20  # factor of the tolerances if fp32 products may be rounded to TF32
OUTLIERS = 100  # one row in 100 may differ, such as a ratio that rounds to the other side of the clip range
REPORT = "Please report this line together with what `python -m fastgrpo.doctor --check` (extra train) prints."

_verdicts = {}  # (kernel, device, variant) -> whether it is trusted

# The scalar loss (None: the sum of the values) and values [m] by name.
Loss = tuple[torch.Tensor | None, dict[str, torch.Tensor | None]]


class Unchecked(Exception):
    """The check of a kernel could not run. The kernel itself may be correct."""


def choose_backend(backend: str, only_chunked: str = "", **tensors: torch.Tensor) -> str:
    """Return "triton" or "chunked". `only_chunked` names an option that Triton does not support, or is ""."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if backend == "auto":
        fits = HAS_TRITON and not only_chunked and len(dtypes) == 1
        fits = fits and all(_fits(tensor, "weight" in tensors) for tensor in tensors.values())
        backend = "triton" if fits else "chunked"
        if not torch.compiler.is_compiling():
            _log_choice(backend, f", the only one that computes {only_chunked}" if only_chunked else "")
    elif backend == "triton":
        if only_chunked:
            raise ValueError(f"backend='triton' does not compute {only_chunked}; use backend='auto' or 'chunked'")
        if not HAS_TRITON:
            raise ValueError("backend='triton' needs Triton (pip install triton, Linux); use backend='chunked'")
        if len(dtypes) > 1:
            raise ValueError(f"backend='triton' needs {' and '.join(tensors)} of one dtype, got {dtypes}")
        supported = launch.HEAD_DTYPES if "weight" in tensors else launch.DTYPES
        for name, tensor in tensors.items():
            launch.check_device(tensor, name, supported)
    return backend


@cache
def _log_choice(backend, why):
    logger.info("backend='auto' runs the %s path%s", backend, why)


def _fits(tensor, is_head):
    """Return whether the Triton kernels support this device and dtype."""
    dtypes = launch.HEAD_DTYPES if is_head else launch.DTYPES
    return tensor.is_cuda and tensor.dtype in dtypes and launch.runs_on(tensor.device)


def cast_for_autocast(backend: str, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast hidden states and head to the dtype of torch.autocast if it is enabled, as nn.Linear does.

    The chunked path computes in fp32, so its tensors are not cast. fp64 tensors are not cast either.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if backend == "chunked" or dtype is None or torch.float64 in (hidden.dtype, weight.dtype):
        return hidden, weight
    if backend == "auto" and not (HAS_TRITON and _fits(hidden.new_empty(0, dtype=dtype), True)):
        return hidden, weight
    return hidden.to(dtype), weight.to(dtype)


def compacts(compact: str | None, backend: str, tokens: torch.Tensor) -> bool:
    """Return whether the host computes which rows carry gradient. On a GPU this is a sync."""
    if compact not in (None, "sync"):
        raise ValueError(f"compact must be None or 'sync', got {compact!r}")
    return compact == "sync" or backend == "chunked" or tokens.device.type == "cpu"


def select(
    name: str, backend: str, kernel: Callable[..., Loss], plain: Callable[..., Loss], states: torch.Tensor,
    rows: PolicyRows, head: Sequence[torch.Tensor | None] = (), objective: Objective | None = None, *,
    by_name: bool = False, check: bool = True, **options: Any,
) -> tuple[Callable[..., Loss], PolicyRows]:  # fmt: skip
    """Return an operation's kernel if it passes the self-check, else its plain function, and the rows to pass.

    `kernel` and `plain` map (states, rows, *head) to the loss and the values of the kept rows; the states are hidden
    states [N, D], logits [N, V] or log-probs [N], and `options` compile-time options. With `by_name` (the caller passed
    "triton"), a failed check raises. Ranks that shard a vocabulary pass check=False: they would have to fail together.
    """
    if backend == "triton" and check and len(rows.targets) and not torch.compiler.is_compiling():
        gradient = any(needed(states, *head))
        given = ("index", "lengths", "entropy_weights", "old_logps", "ref_logps", "sampler_logps")
        knobs = () if objective is None else kernel_knobs(objective)
        variant = {
            "dtype": states.dtype,
            "aligned": states.data_ptr() % 16 == 0,
            "shapes": (tuple(states.shape[1:]), *(None if x is None else tuple(x.shape) for x in head)),
            "gradient": gradient,
            **options,
            "objective": tuple(x if isinstance(x, str | bool) else x is not None for x in knobs),
            "temperatures": isinstance(rows.temperature, torch.Tensor),
            **{field: getattr(rows, field) is not None for field in given},
        }
        frozen = [None if x is None else x.detach() for x in head]

        def compare():
            sample, few = sample_of(states, rows)
            return difference(lambda x: kernel(x, few, *frozen), lambda x: plain(x, few, *frozen), sample, gradient)

        remedy = 'Use backend="auto" to continue without it.' if by_name else None
        if not trusted(name, states.device, variant, compare, remedy):
            backend, rows = "chunked", _compacted(rows)
    return kernel if backend == "triton" else plain, rows


def _compacted(rows):
    """Drop the rows without gradient, which are last. Their number costs a sync."""
    if rows.active is None:
        return rows
    return rows.cut(slice(0, int(rows.active.sum())), slice(0, -1))._replace(active=None)


def trusted(
    kernel: str, device: torch.device, variant: dict[str, Any], compare: Callable[[], str | None],
    remedy: str | None = None,
) -> bool:  # fmt: skip
    """Return whether to use a kernel. `compare` checks a new variant and returns its problem, or None.

    With a `remedy`, a failure raises an error that ends with it. A kernel is not checked while a CUDA graph is captured
    or torch.compile traces.
    """
    if torch.compiler.is_compiling():
        return True
    level = os.environ.get(VARIABLE, "1" if device.type == "cuda" else "0")
    if level not in ("0", "1", "raise"):
        raise ValueError(f"the environment variable {VARIABLE} must be 0, 1 or raise, got {level!r}")
    key = kernel, device, tuple(variant.items())
    if level == "0" or key in _verdicts:
        return level == "0" or _verdicts[key]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    problem = _problem(kernel, device, compare)
    if problem is not None:
        options = ", ".join(f"{name} {value}" for name, value in variant.items())
        message = f"the kernel of {kernel} failed its check on {launch.describe(device)} ({options}): {problem}."
        if remedy or level == "raise":
            raise RuntimeError(" ".join(filter(None, (message, remedy, REPORT))))
        logger.warning("%s Plain PyTorch is used from now on, which is slower. %s", message, REPORT)
    _verdicts[key] = problem is None
    return _verdicts[key]


def _problem(kernel, device, compare):
    """Run the comparison and return the problem of the kernel, or None."""
    try:
        with _alone(device):
            return compare()
    except (Unchecked, torch.OutOfMemoryError) as error:
        logger.info("the kernel of %s is used without a check: %s", kernel, _first_line(error))
        return None
    except Exception as error:
        _check_context(device, error)
        return f"{type(error).__name__}: {_first_line(error)}"


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Run the comparison without inference mode, no_grad, checkpointing hooks and torch's sync debug mode."""
    alarm = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if alarm:
        torch.cuda.set_sync_debug_mode(0)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        ):
            yield
    finally:
        if alarm:
            torch.cuda.set_sync_debug_mode(alarm)


def _check_context(device, error):
    """Raise if a failed kernel has broken the CUDA context, which makes the GPU unusable in this process."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise RuntimeError(
            "a kernel of fastgrpo broke the CUDA context in its first use; find it with `python -m fastgrpo.doctor "
            '--check`, or use backend="chunked", which runs no kernels'
        ) from error


def _first_line(error):
    return next(iter(str(error).strip().splitlines()), "no reason given")


def sample_of(states: torch.Tensor, kept: PolicyRows) -> tuple[torch.Tensor, PolicyRows]:
    """Take the first kept rows of a call: `ROWS` of them, or whole sequences if the objective needs these.

    Every row gets weight 1 and advantage 1 or -1, so that it has a gradient to compare.

    `states` are [N, D] hidden states, [N, V] logits or [N] log-probs. At least one row is kept.
    """
    count, sequences = min(ROWS, len(kept.targets)), slice(None)
    if kept.lengths is not None:
        ends = kept.lengths.cumsum(0).tolist()
        last = next(i for i, end in enumerate(ends) if end >= count)
        count, sequences = ends[last], slice(0, last + 1)
        if count > MOST_ROWS:
            raise Unchecked(f"its first sequences have {count} tokens")
    part = slice(0, count)
    sample = states[part if kept.index is None else kept.index[part]].detach()
    if kept.active is not None:
        sample = sample.masked_fill(~kept.active[part].view(-1, *[1] * (sample.ndim - 1)), 0)
    rows = kept.cut(part, sequences)
    signs = 1.0 - 2.0 * (torch.arange(count, device=states.device) % 2)
    return sample, rows._replace(
        index=None,
        active=None,
        host_lengths=None if kept.host_lengths is None else kept.host_lengths[sequences],
        advantages=None if rows.advantages is None else signs.to(rows.advantages.dtype),
        weights=None if rows.weights is None else torch.ones_like(rows.weights),
        entropy_weights=None if rows.entropy_weights is None else torch.full_like(rows.entropy_weights, 0.1),
    )


def difference(
    fused: Callable[[torch.Tensor], Loss], plain: Callable[[torch.Tensor], Loss], states: torch.Tensor, gradient: bool,
) -> str | None:  # fmt: skip
    """Compare a kernel with plain PyTorch on the states [m, ...] in fp32; with `gradient`, their gradients too."""
    loose = TF32 if states.dtype == torch.float32 and launch.precision(states.dtype) == "tf32" else 1
    try:
        truth, values = _differentiate(plain, states.float(), gradient)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise Unchecked(f"plain PyTorch cannot compute it ({_first_line(error)})") from error
    ours, found = _differentiate(fused, states, gradient)
    for name in ("logps", "entropy"):
        if values.get(name) is not None:
            far = values_differ(found[name], values[name], loose)
            if far:
                return f"{name} {far}"
    if not gradient:
        return None
    ours, truth = (grad.float().reshape(len(grad), -1) for grad in (ours, truth))
    known = truth.isfinite().all(1)  # rows with NaN cannot be compared
    truth = truth[known]
    row_errors = (ours[known] - truth).norm(dim=1).nan_to_num(torch.inf).sort().values
    row_errors = row_errors[: len(row_errors) - len(row_errors) // OUTLIERS]
    share = (row_errors.norm() / truth.norm().clamp(min=1e-30)).item() if len(truth) else 0.0
    allowed = GRADIENTS * loose
    return None if share <= allowed else f"gradients differ by {share:.3g} of their norm ({allowed:.3g} is allowed)"


def _differentiate(function, states, gradient):
    """Return the gradient of the states (or None) and the values by name."""
    leaf = states.clone().requires_grad_(gradient)
    loss, values = function(leaf.clone() if gradient else leaf)
    if gradient and loss is None:
        loss = sum(value.sum() for value in values.values() if value is not None)
    return torch.autograd.grad(loss, leaf)[0] if gradient else None, values


def values_differ(found: torch.Tensor, expected: torch.Tensor, loose: float = 1) -> str | None:
    """Compare log-probs, entropies or probabilities [m] of a kernel; `loose` multiplies the tolerance."""
    found, expected = found.detach().float(), expected.detach().float()
    far = (found - expected).abs() - VALUES * loose * (1 + expected.abs())
    wrong = ~((far <= 0) | (found == expected) | (found.isnan() & expected.isnan()))
    if wrong.sum().item() <= len(wrong) // OUTLIERS:
        return None
    row = wrong.nonzero()[0].item()
    return f"differ in {wrong.sum().item()} of {len(wrong)} rows, such as {found[row]:.6g} and {expected[row]:.6g}"
