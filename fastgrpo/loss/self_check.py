"""The first use of a kernel in a process is checked: a sample of the real call is computed by the plain path as well.

No test of ours can know every GPU, driver and compiler that people have. So each variant of a kernel (its dtype, its
options, its alignment) is tried on the first rows of the first call that wants it. Where it does not compile, does not
fit the GPU, or disagrees with plain PyTorch, one warning says so, and the plain path computes from then on. The
environment variable FASTGRPO_SELF_CHECK chooses: 1 (the default on GPUs), 0 (never), raise (an error instead of the
warning and the plain path). In Triton's interpreter, on a CPU, only a variable that is set asks for the check.

Shapes: N rows of hidden states, logits or log-probs (tokens), M <= N kept ones, m rows of the sample.
"""

import logging
import os
from collections.abc import Callable, Hashable
from typing import Any

import torch

from fastgrpo.kernels import launch
from fastgrpo.kernels.policy_rows import PolicyRows

logger = logging.getLogger(__name__)

VARIABLE = "FASTGRPO_SELF_CHECK"
ROWS = 256  # rows of a sample
# What the two paths may differ by: log-probs and entropies by this much, and by this share of themselves; gradients by
# this share of their norm. Rounding E to bf16 costs 2e-3 of a gradient, and rounding the gradient itself as much again.
VALUES, GRADIENTS = 5e-4, 1e-2
TF32 = 20  # how many times more, where products of fp32 may be rounded to TF32
OUTLIERS = 100  # one row of so many may differ, such as a ratio that rounds to the other side of the clip range

_verdicts = {}  # (kernel, variant) -> whether it is trusted


def trusted(
    kernel: str, device: torch.device, variant: Hashable, compare: Callable[[], str | None], asked: bool = False
) -> bool:
    """Tell whether to use a kernel, and try it where this variant of it has not been tried yet.

    Nothing is tried while a CUDA graph is recorded or torch.compile traces: the kernel is then taken as it is.

    Args:
        kernel: The name of the public function.
        device: The device that it runs on.
        variant: What decides which code runs: dtypes, options, alignment.
        compare: A function that runs the kernel and the plain path on a sample, and returns None or how they differ.
        asked: Whether the user asked for this kernel by name. A kernel that fails is then an error.

    Returns:
        Whether to use the kernel; if not, the plain path must compute.

    Raises:
        RuntimeError: The kernel failed, and it was asked for by name or the variable is "raise".
        ValueError: The variable has another value than 0, 1 and raise.
    """
    if torch.compiler.is_compiling():
        return True
    level = os.environ.get(VARIABLE, "1" if device.type == "cuda" else "0")
    if level not in ("0", "1", "raise"):
        raise ValueError(f"the environment variable {VARIABLE} must be 0, 1 or raise, got {level!r}")
    key = kernel, device, variant
    if level == "0" or key in _verdicts:
        return level == "0" or _verdicts[key]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    problem = _problem(compare)
    if problem is not None:
        said = f"the kernel of {kernel} failed its check on {launch.describe(device)}, for {variant}: {problem}."
        advice = "Please report this line together with what `python -m fastgrpo.doctor --check` prints"
        if asked or level == "raise":
            raise RuntimeError(f'{said} Use backend="auto" or "chunked" to go without it. {advice}')
        logger.warning("%s Plain PyTorch computes it from now on, which is slower. %s", said, advice)
    _verdicts[key] = problem is None
    return _verdicts[key]


def _problem(compare):
    """Run the comparison; returns None, or what is wrong."""
    try:
        with torch.enable_grad():
            return compare()
    except torch.OutOfMemoryError:
        raise  # of the GPU's memory, which is no fault of the kernel
    except Exception as error:
        if "CUDA error" in str(error):
            raise RuntimeError(
                "a kernel of fastgrpo broke the CUDA context in its first use; `python -m fastgrpo.doctor --check` "
                'finds it, and backend="chunked" goes without all of them'
            ) from error
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def sample_of(states: torch.Tensor, kept: PolicyRows) -> tuple[torch.Tensor, PolicyRows]:
    """Take the first kept rows of a call: `ROWS` of them, or whole sequences where the objective looks at these.

    Args:
        states: [N, D] hidden states, [N, V] logits or [M] log-probs of the kept rows.
        kept: The M kept rows.

    Returns:
        The states of m rows, 0 where a row carries no gradient; and these rows, all of them kept.
    """
    count, sequences = min(ROWS, len(kept.targets)), slice(None)
    if kept.lengths is not None:
        ends = kept.lengths.cumsum(0).tolist()
        last = next(i for i, end in enumerate(ends) if end >= count)
        count, sequences = ends[last], slice(0, last + 1)
    part = slice(0, count)
    of_kept = states if kept.index is None or states.ndim == 1 else states[kept.index[part]]
    of_kept = of_kept[part].detach()
    if kept.active is not None:
        dead = ~kept.active[part]
        of_kept = of_kept.masked_fill(dead[:, None] if of_kept.ndim > 1 else dead, 0)
    host = None if kept.host_lengths is None else kept.host_lengths[sequences]
    return of_kept, kept.cut(part, sequences)._replace(index=None, active=None, host_lengths=host)


def losses_differ(
    fused: Callable[[torch.Tensor, PolicyRows], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    plain: Callable[[torch.Tensor, PolicyRows], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    states: torch.Tensor,
    kept: PolicyRows,
) -> str | None:
    """Compare two ways to compute a loss on a sample of its rows.

    Args:
        fused: The kernel: states and kept rows -> the loss, a scalar, and log-probs and more by name.
        plain: The same in plain PyTorch.
        states: As for `sample_of`.
        kept: The M kept rows.

    Returns:
        None, or how they differ.
    """
    sample, rows = sample_of(states, kept)
    return difference(lambda x: fused(x, rows), lambda x: plain(x, rows), sample, states.requires_grad)


def difference(
    fused: Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    plain: Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    states: torch.Tensor,
    gradient: bool = True,
) -> str | None:
    """Compare two ways to compute a loss, with its gradient.

    Args:
        fused: The kernel: states [m, ...] -> the loss, a scalar, and log-probs and more [m] by name.
        plain: The same in plain PyTorch.
        states: The states of the sample, of which each gets a copy.
        gradient: Whether the gradients of the states are compared.

    Returns:
        None, or how they differ.
    """
    loose = TF32 if states.dtype == torch.float32 and launch.precision(states.dtype) == "tf32" else 1
    truth, values, scale = _run(plain, states, gradient, None)
    ours, found, _ = _run(fused, states, gradient, scale)
    for name in ("logps", "entropy"):
        if values.get(name) is not None:
            far = values_differ(found[name], values[name], loose)
            if far:
                return f"{name} {far}"
    if not gradient:
        return None
    ours, truth = (grad.float().reshape(len(grad), -1) for grad in (ours, truth))
    known = truth.isfinite().all(1)  # a batch with NaN in it proves nothing
    truth = truth[known] * scale
    row_errors = (ours[known] - truth).norm(dim=1).nan_to_num(torch.inf).sort().values
    row_errors = row_errors[: len(row_errors) - len(row_errors) // OUTLIERS]
    share = (row_errors.norm() / truth.norm().clamp(min=1e-30)).item() if len(truth) else 0.0
    allowed = GRADIENTS * loose
    return None if share <= allowed else f"gradients differ by {share:.3g} of their norm ({allowed:.3g} is allowed)"


def values_differ(found: torch.Tensor, expected: torch.Tensor, loose: float = 1) -> str | None:
    """Compare log-probs or entropies.

    Args:
        found: [m] of the kernel.
        expected: [m] of the plain path.
        loose: A factor on what is allowed.

    Returns:
        None, or how they differ.
    """
    found, expected = found.detach().float(), expected.detach().float()
    far = (found - expected).abs() - VALUES * loose * (1 + expected.abs())
    wrong = ~((far <= 0) | (found == expected) | (found.isnan() & expected.isnan()))
    if wrong.sum().item() <= len(wrong) // OUTLIERS:
        return None
    row = wrong.nonzero()[0].item()
    return f"differ in {wrong.sum().item()} of {len(wrong)} rows, such as {found[row]:.6g} and {expected[row]:.6g}"


def _run(function, states, gradient, scale) -> tuple[Any, dict[str, torch.Tensor], float]:
    """Run one path; returns the gradient times `scale`, the values, and a scale that makes the largest entry 1.

    The scale keeps small gradients out of the range in which fp16 loses them.
    """
    leaf = states.clone().requires_grad_(gradient)
    loss, values = function(leaf.clone() if gradient else leaf)
    if not gradient:
        return None, values, 1.0
    (grad,) = torch.autograd.grad(loss, leaf, loss.new_tensor(1.0 if scale is None else scale))
    largest = grad.abs().max().item()
    return grad, values, 1 / largest if largest > 0 else 1.0
