"""Products 2 and 3 of the head's gradient, by cuBLAS: dH = v (E W), dW = E^T (v H), dbias = E^T v.

Shapes: n rows of a chunk (one a token), V vocabulary, D hidden. E [n, V] is in the dtype of the weight and v [n] is
fp32; linear_logprob.py says what they are. v scales the rows of dH after its product, in fp32, and the rows of H before
the product of dW, so that E itself need not be written again.
"""

from collections.abc import Iterator
from functools import cache

import torch

from fastgrpo.kernels.softmax import all_reduce_

CAST_ROWS = 8192  # rows of a 16-bit weight cast to fp32 at a time on a GPU
CAST_BYTES = 2 * 2**20  # fp32 bytes cast at a time on a CPU, whose cache holds them until the product has read them


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: fp64 for fp64 inputs (for gradcheck), and fp32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def no_autocast(tensor: torch.Tensor) -> torch.autocast:
    """Keep fp32 products in fp32, even inside the caller's torch.autocast."""
    return torch.autocast(tensor.device.type, enabled=False)


def needed(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    """Tell which tensors want a gradient now.

    Autograd functions are told this from outside: their ctx.needs_input_grad stays True under no_grad.
    """
    grad = torch.is_grad_enabled()
    return tuple(grad and tensor is not None and tensor.requires_grad for tensor in tensors)


def mm_fp32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply with fp32 output, whatever the dtype of the operands.

    The CPU, on which the interpreted tests run, has no such product of 16-bit operands: there they are cast.

    Args:
        a: [n, k].
        b: [k, m].
        out: [n, m] fp32 that is written, or None for a new tensor.

    Returns:
        [n, m] fp32.
    """
    if a.is_cuda and a.dtype != torch.float32:
        if out is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def weight_blocks(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Cut a weight into blocks of rows in another dtype, or leave it whole where it has that dtype.

    A whole copy would take twice the memory of a 16-bit weight. On a CPU it would also be written to memory and read
    back, which takes several times as long as the product of the few rows of a decode step.

    Args:
        weight: [V, D].
        dtype: The dtype of the blocks.
    """
    step = max(1, CAST_BYTES // (4 * weight.shape[1])) if weight.device.type == "cpu" else CAST_ROWS
    step = len(weight) if weight.dtype == dtype else step
    for start in range(0, len(weight), step):
        yield slice(start, start + step), weight[start : start + step].to(dtype)


def linear_fp32(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute states @ weight.T with fp32 output, on a CPU too, whose 16-bit products round their output to 16 bits.

    Args:
        states: [n, D], 16-bit, fp32 or fp64.
        weight: [V, D] in the same dtype.

    Returns:
        [n, V] fp32.
    """
    if states.dtype == torch.float64:
        return (states @ weight.T).float()
    if states.is_cuda or states.dtype == torch.float32:
        return mm_fp32(states, weight.T)
    states = states.float()
    out = torch.empty(len(states), len(weight), dtype=torch.float32, device=states.device)
    for rows, block in weight_blocks(weight, torch.float32):
        out[:, rows] = states @ block.T
    return out


@cache
def _adds_in_place(device, dtype):
    """Tell whether addmm takes an fp32 sum beside 16-bit operands. torch before 2.10 refuses."""
    try:
        total = torch.zeros(16, 16, device=device)
        operand = torch.zeros(16, 16, device=device, dtype=dtype)
        torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def add_mm_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add a product to an fp32 sum, total += a @ b, without a second tensor of its size where torch can.

    Args:
        total: [n, m] fp32, changed in place.
        a: [n, k].
        b: [k, m].
    """
    if a.dtype == torch.float32:
        return total.addmm_(a, b)
    if a.is_cuda and _adds_in_place(a.device, a.dtype):
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(mm_fp32(a, b))


def hidden_product(exps: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, group: str | None = None) -> torch.Tensor:
    """Compute dH = v (E W): an fp32 product, scaled, summed over the ranks of the group, and rounded once.

    Args:
        exps: E [n, V].
        v: [n] fp32.
        weight: [V, D].
        group: Name of the process group over which the rows of the weight are sharded, or None.

    Returns:
        dH [n, D] in the dtype of the weight.
    """
    if group is not None:
        return all_reduce_(mm_fp32(exps, weight).mul_(v[:, None]), group).to(weight.dtype)
    out = torch.empty(len(exps), weight.shape[1], dtype=weight.dtype, device=weight.device)
    return torch.mul(mm_fp32(exps, weight), v[:, None], out=out)


def _scaled(hidden, v):
    """Compute v H in the dtype of H, and the factor that was taken out of it for fp16, which would lose small v."""
    if hidden.dtype != torch.float16:
        return torch.mul(hidden, v[:, None], out=torch.empty_like(hidden)), None
    factor = v.abs().amax().clamp(min=1e-30)
    return torch.mul(hidden, (v / factor)[:, None], out=torch.empty_like(hidden)), factor


def weight_product(exps: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute dW = E^T (v H), accumulated in fp32.

    Args:
        exps: E [n, V].
        v: [n] fp32.
        hidden: H [n, D].
        dtype: Dtype of the result.

    Returns:
        dW [V, D].
    """
    scaled, factor = _scaled(hidden, v)
    if factor is None and dtype == exps.dtype:
        return exps.T @ scaled
    product = mm_fp32(exps.T, scaled)
    return (product if factor is None else product.mul_(factor)).to(dtype)


def add_weight_product_(
    total: torch.Tensor, exps: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, first: bool
) -> torch.Tensor:
    """Add a chunk to dW: total += E^T (v H).

    Args:
        total: [V, D] fp32, changed in place.
        exps: E [n, V].
        v: [n] fp32.
        hidden: H [n, D].
        first: Whether this is the first chunk, which overwrites `total`, so that it need not be zeroed before.
    """
    scaled, factor = _scaled(hidden, v)
    if factor is None:
        return mm_fp32(exps.T, scaled, out=total) if first else add_mm_(total, exps.T, scaled)
    product = mm_fp32(exps.T, scaled)
    return torch.mul(product, factor, out=total) if first else total.addcmul_(product, factor)


def bias_product(exps: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute dbias = E^T v.

    Args:
        exps: E [n, V].
        v: [n] fp32.

    Returns:
        dbias [V] fp32.
    """
    # v is scaled to a largest entry of 1, which no dtype loses
    factor = v.abs().amax().clamp(min=1e-30)
    return mm_fp32(exps.T, (v / factor).to(exps.dtype)[:, None])[:, 0] * factor
