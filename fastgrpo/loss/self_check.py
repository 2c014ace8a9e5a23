"""The first use of a kernel in a process is checked: a sample of the real call is computed by the plain path as well.

No test of ours can know every GPU, driver and compiler that people have. So each variant of a kernel (its dtype, its
options, the shape of the head) is tried on the first rows of the first call that wants it. Where it does not compile,
does not fit the GPU, or disagrees with plain PyTorch, one warning says so, and the plain path computes from then on.
The environment variable FASTGRPO_SELF_CHECK chooses: 1 (the default on GPUs), 0 (never), raise (an error instead of the
warning and the plain path). In Triton's interpreter, on a CPU, only a variable that is set asks for the check.

The gradients of weight and bias are not compared: they are PyTorch's own products of the exponentials of which the
gradient of the hidden states, which is compared, is made too.

Shapes: N rows of hidden states, logits or log-probs (tokens), M <= N kept ones, m rows of the sample.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastgrpo.kernels import launch
from fastgrpo.kernels.objectives import PolicyRows

logger = logging.getLogger(__name__)

VARIABLE = "FASTGRPO_SELF_CHECK"
ROWS, MOST_ROWS = 256, 4096  # rows of a sample; at most, where it must hold whole sequences
# What the two paths may differ by: log-probs and entropies by this much, and by this share of themselves; gradients by
# this share of their norm. Rounding E to bf16 costs 2e-3 of a gradient, and rounding the gradient itself as much again.
VALUES, GRADIENTS = 5e-4, 1e-2
TF32 = 20  # how many times more, where products of fp32 may be rounded to TF32
OUTLIERS = 100  # one row of so many may differ, such as a ratio that rounds to the other side of the clip range
ANY_BACKEND = 'backend="auto" goes on without it.'  # the remedy where a loss was asked for with backend="triton"
REPORT = "Please report this line together with what `python -m fastgrpo.doctor --check` prints."

_verdicts = {}  # (kernel, device, variant) -> whether it is trusted

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


class Unchecked(Exception):
    """Says why a kernel could not be checked, which is no fault of the kernel's."""


def trusted(
    kernel: str,
    device: torch.device,
    variant: dict[str, Any],
    compare: Callable[[], str | None],
    remedy: str | None = None,
) -> bool:
    """Tell whether to use a kernel, and try it where this variant of it has not been tried yet.

    Nothing is tried while a CUDA graph is recorded or torch.compile traces: the kernel is then taken as it is.
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
        said = ", ".join(f"{name} {value}" for name, value in variant.items())
        said = f"the kernel of {kernel} failed its check on {launch.describe(device)} ({said}): {problem}."
        if remedy or level == "raise":
            raise RuntimeError(" ".join(filter(None, (said, remedy, REPORT))))
        logger.warning("%s Plain PyTorch computes it from now on, which is slower. %s", said, REPORT)
    _verdicts[key] = problem is None
    return _verdicts[key]


def _problem(kernel, device, compare):
    """Run the comparison; returns None, or what is wrong with the kernel."""
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
    """Keep what surrounds the real call away from the comparison.

    That is inference mode, no_grad, the hooks with which a checkpointed region would compute itself again, and torch's
    alarm at waits for the device: a comparison must wait.
    """
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
    """Raise where a failed kernel has broken the CUDA context: nothing can run on the GPU then."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise RuntimeError(
            "a kernel of fastgrpo broke the CUDA context in its first use; `python -m fastgrpo.doctor --check` finds "
            'it, and backend="chunked" goes without all of them'
        ) from error


def _first_line(error):
    return next(iter(str(error).strip().splitlines()), "no reason given")


def losses_differ(
    fused: Callable[[torch.Tensor, PolicyRows], Loss], plain: Callable[[torch.Tensor, PolicyRows], Loss],
    states: torch.Tensor, kept: PolicyRows, gradient: bool,
) -> str | None:  # fmt: skip
    """Compare two ways to compute a loss on a sample of its rows."""
    sample, rows = sample_of(states, kept)
    return difference(lambda x: fused(x, rows), lambda x: plain(x, rows), sample, gradient)


def sample_of(states: torch.Tensor, kept: PolicyRows) -> tuple[torch.Tensor, PolicyRows]:
    """Take the first kept rows of a call: `ROWS` of them, or whole sequences where the objective looks at these.

    Every row gets a gradient, so that all can be compared: its weight is 1 and its advantage 1 or -1.

    Args:
        states: [N, D] hidden states, [N, V] logits or [M] log-probs of the kept rows.
        kept: The M kept rows, at least one.
    """
    count, sequences = min(ROWS, len(kept.targets)), slice(None)
    if kept.lengths is not None:
        ends = kept.lengths.cumsum(0).tolist()
        last = next(i for i, end in enumerate(ends) if end >= count)
        count, sequences = ends[last], slice(0, last + 1)
        if count > MOST_ROWS:
            raise Unchecked(f"its first sequences have {count} tokens")
    part = slice(0, count)
    of_kept = states if kept.index is None or states.ndim == 1 else states[kept.index[part]]
    of_kept = of_kept[part].detach()
    if kept.active is not None:
        dead = ~kept.active[part]
        of_kept = of_kept.masked_fill(dead[:, None] if of_kept.ndim > 1 else dead, 0)
    rows = kept.cut(part, sequences)
    signs = 1.0 - 2.0 * (torch.arange(count, device=states.device) % 2)
    return of_kept, rows._replace(
        index=None,
        active=None,
        host_lengths=None if kept.host_lengths is None else kept.host_lengths[sequences],
        advantages=signs.to(rows.advantages.dtype),
        weights=torch.ones_like(rows.weights),
        entropy_weights=None if rows.entropy_weights is None else torch.full_like(rows.entropy_weights, 0.1),
    )


def difference(
    fused: Callable[[torch.Tensor], Loss], plain: Callable[[torch.Tensor], Loss], states: torch.Tensor, gradient: bool,
) -> str | None:  # fmt: skip
    """Compare two ways to compute a loss, with its gradient.

    Args:
        fused: The kernel: states [m, ...] -> the loss, a scalar, and log-probs and more [m] by name.
        plain: The same in plain PyTorch. It gets the states in fp32.
        states: The states of the sample, of which each gets a copy.
        gradient: Whether the gradients of the states are compared.
    """
    loose = TF32 if states.dtype == torch.float32 and launch.precision(states.dtype) == "tf32" else 1
    try:
        truth, values = _run(plain, states.float(), gradient)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise Unchecked(f"plain PyTorch cannot compute it ({_first_line(error)})") from error
    ours, found = _run(fused, states, gradient)
    for name in ("logps", "entropy"):
        if values.get(name) is not None:
            far = values_differ(found[name], values[name], loose)
            if far:
                return f"{name} {far}"
    if not gradient:
        return None
    ours, truth = (grad.float().reshape(len(grad), -1) for grad in (ours, truth))
    known = truth.isfinite().all(1)  # a batch with NaN in it proves nothing
    truth = truth[known]
    row_errors = (ours[known] - truth).norm(dim=1).nan_to_num(torch.inf).sort().values
    row_errors = row_errors[: len(row_errors) - len(row_errors) // OUTLIERS]
    share = (row_errors.norm() / truth.norm().clamp(min=1e-30)).item() if len(truth) else 0.0
    allowed = GRADIENTS * loose
    return None if share <= allowed else f"gradients differ by {share:.3g} of their norm ({allowed:.3g} is allowed)"


def _run(function, states, gradient):
    """Return the gradient of the states, or None, and the values by name."""
    leaf = states.clone().requires_grad_(gradient)
    loss, values = function(leaf.clone() if gradient else leaf)
    return torch.autograd.grad(loss, leaf)[0] if gradient else None, values


def values_differ(found: torch.Tensor, expected: torch.Tensor, loose: float = 1) -> str | None:
    """Compare log-probs, entropies or probabilities.

    Args:
        found: [m] of the kernel.
        expected: [m] of the plain path.
        loose: A factor on what is allowed.
    """
    found, expected = found.detach().float(), expected.detach().float()
    far = (found - expected).abs() - VALUES * loose * (1 + expected.abs())
    wrong = ~((far <= 0) | (found == expected) | (found.isnan() & expected.isnan()))
    if wrong.sum().item() <= len(wrong) // OUTLIERS:
        return None
    row = wrong.nonzero()[0].item()
    return f"differ in {wrong.sum().item()} of {len(wrong)} rows, such as {found[row]:.6g} and {expected[row]:.6g}"
