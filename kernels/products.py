"""Products 2 and 3 of the head's gradient, by cuBLAS: dH = v (E W), dW = E^T (v H), dbias = E^T v.

Shapes: n rows of a chunk, V vocabulary, D hidden; E [n, V] and v [n] fp32, see linear_logprob.py. v scales rows after
the first product, in fp32, and before the second: E itself is never touched again.
"""

from functools import cache

import torch

from fastgrpo.kernels.softmax import all_reduce_


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of the arithmetic: fp32 for every input but fp64, which stays fp64 (for gradcheck).

    Args:
        tensor: An input of the operation.

    Returns:
        torch.float32 or torch.float64.
    """
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def no_autocast(tensor: torch.Tensor) -> torch.autocast:
    """Keep fp32 products in fp32, even inside the caller's torch.autocast.

    Args:
        tensor: Any tensor on the device of the products.

    Returns:
        A context manager.
    """
    return torch.autocast(tensor.device.type, enabled=False)


def needed(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    """Tell which tensors want a gradient now.

    Autograd functions are told this from outside: their ctx.needs_input_grad stays True under no_grad.

    Args:
        tensors: The inputs of the operation; None is an input that was not given.

    Returns:
        One bool a tensor.
    """
    grad = torch.is_grad_enabled()
    return tuple(grad and tensor is not None and tensor.requires_grad for tensor in tensors)


def mm_fp32(a, b, out=None):
    """a @ b with fp32 output whatever the operands; the CPU (interpreted tests) has no such product for 16 bits."""
    if a.is_cuda and a.dtype != torch.float32:
        if out is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


@cache
def _adds_in_place(device, dtype):
    """Whether addmm takes an fp32 sum beside 16-bit operands: torch before 2.10 refuses."""
    try:
        total = torch.zeros(16, 16, device=device)
        operand = torch.zeros(16, 16, device=device, dtype=dtype)
        torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def add_mm_(total, a, b):
    """total += a @ b, fp32, without a second [V, D] where torch can."""
    if a.dtype == torch.float32:
        return total.addmm_(a, b)
    if a.is_cuda and _adds_in_place(a.device, a.dtype):
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(mm_fp32(a, b))


def hidden_product(exps, v, weight, group=None):
    """dH [n, D] = v (E W): the product in fp32, scaled, summed over the ranks of the group, rounded once."""
    if group is not None:
        return all_reduce_(mm_fp32(exps, weight).mul_(v[:, None]), group).to(weight.dtype)
    out = torch.empty(len(exps), weight.shape[1], dtype=weight.dtype, device=weight.device)
    return torch.mul(mm_fp32(exps, weight), v[:, None], out=out)


def _scaled(hidden, v):
    """(v H in the dtype of H, a factor taken out or None): fp16 would lose small v."""
    if hidden.dtype != torch.float16:
        return torch.mul(hidden, v[:, None], out=torch.empty_like(hidden)), None
    factor = v.abs().amax().clamp(min=1e-30)
    return torch.mul(hidden, (v / factor)[:, None], out=torch.empty_like(hidden)), factor


def weight_product(exps, v, hidden, dtype):
    """dW [V, D] = E^T (v H) in `dtype`, accumulated in fp32."""
    scaled, factor = _scaled(hidden, v)
    if factor is None and dtype == exps.dtype:
        return exps.T @ scaled
    product = mm_fp32(exps.T, scaled)
    return (product if factor is None else product.mul_(factor)).to(dtype)


def add_weight_product_(total, exps, v, hidden, first):
    """total [V, D] fp32 += E^T (v H); the first is written: nothing is read, nothing need be zeroed."""
    scaled, factor = _scaled(hidden, v)
    if factor is None:
        return mm_fp32(exps.T, scaled, out=total) if first else add_mm_(total, exps.T, scaled)
    product = mm_fp32(exps.T, scaled)
    return torch.mul(product, factor, out=total) if first else total.addcmul_(product, factor)


def bias_product(exps, v):
    """dbias [V] fp32 = E^T v; v goes in with its largest at 1, which no dtype loses."""
    factor = v.abs().amax().clamp(min=1e-30)
    return mm_fp32(exps.T, (v / factor).to(exps.dtype)[:, None])[:, 0] * factor
