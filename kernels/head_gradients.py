"""Products 2 and 3 of the head as operators, at once or summed over chunks, and what autograd receives of them.

    dH = v (E W),   dW = E^T (v H),   dbias = E^T v          (E and v: linear_logprob.py)

Shapes: n rows of a chunk, M rows in all, V vocabulary, D hidden. `group` names the process group over which the rows of
the weight are sharded, or is None. dH is summed over its ranks, once and in fp32; dW and dbias stay with their shard.
"""

import torch

from fastgrpo.kernels import launch
from fastgrpo.kernels.products import (
    add_weight_product_,
    bias_product,
    hidden_product,
    mm_fp32,
    no_autocast,
    weight_product,
)
from fastgrpo.kernels.softmax import all_reduce_

Tensor = torch.Tensor


@launch.operator("fastgrpo::head_products")
def head_products(exps: Tensor, v: Tensor, hidden: Tensor, weight: Tensor, needs: list[bool],
                  weight_dtype: torch.dtype, group: str | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dH [n, D], dW [V, D] in weight_dtype, dbias [V] fp32; empty where not needed."""
    if len(hidden) == 0:
        return HeadGradients(0, weight, needs).result(weight_dtype)
    with no_autocast(hidden):
        return (
            hidden_product(exps, v, weight, group) if needs[0] else hidden.new_empty(0),
            weight_product(exps, v, hidden, weight_dtype) if needs[1] else weight.new_empty(0, dtype=weight_dtype),
            bias_product(exps, v) if needs[2] else v.new_empty(0),
        )


@head_products.register_fake
def _(exps, v, hidden, weight, needs, weight_dtype, group):
    return (
        hidden.new_empty(hidden.shape if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0, dtype=weight_dtype),
        v.new_empty(weight.shape[0] if needs[2] else 0),
    )


@launch.operator("fastgrpo::head_products_add_", mutates_args=("hidden_sum", "weight_sum", "bias_sum"))
def head_products_add_(exps: Tensor, v: Tensor, hidden: Tensor, weight: Tensor, hidden_sum: Tensor | None,
                       weight_sum: Tensor | None, bias_sum: Tensor | None, start: int) -> None:  # fmt: skip
    """The same of a chunk: rows `start` on of hidden_sum [M, D] are written; dW and dbias fp32 are added.

    The first chunk, at 0, writes these too: nothing is read, nothing need be zeroed.
    """
    first = start == 0
    with no_autocast(hidden):
        if weight_sum is not None:
            add_weight_product_(weight_sum, exps, v, hidden, first)
        if bias_sum is not None:
            product = bias_product(exps, v)
            bias_sum.copy_(product) if first else bias_sum.add_(product)
        if hidden_sum is not None:
            part = hidden_sum[start : start + len(exps)]
            if part.dtype == torch.float32:
                mm_fp32(exps, weight, out=part).mul_(v[:, None])
            else:
                torch.mul(mm_fp32(exps, weight), v[:, None], out=part)


class HeadGradients:
    """dH [M, D], dW [V, D], dbias [V] over several chunks, added from the first row to the last.

    dW and dbias add up in fp32. dH is in the dtype of hidden, or in fp32 where `scaled` (grad_output is still to come:
    rounding before it and after would be two roundings) or where ranks add to it.
    """

    def __init__(self, rows, weight, needs, group=None, scaled=False):
        """rows: M. The weight has the dtype of hidden."""
        self.weight, self.group, self.start = weight, group, 0
        fp32 = {"dtype": torch.float32, "device": weight.device}
        dtype = torch.float32 if scaled or group is not None else weight.dtype
        shape = rows, weight.shape[1]
        self.hidden_sum = torch.empty(shape, dtype=dtype, device=weight.device) if needs[0] else None
        self.weight_sum = torch.empty(weight.shape, **fp32) if needs[1] else None
        self.bias_sum = torch.empty(weight.shape[0], **fp32) if needs[2] else None

    def add(self, exps, v, hidden):
        """exps [n, V], v [n], hidden [n, D]: the next n rows."""
        sums = self.hidden_sum, self.weight_sum, self.bias_sum
        head_products_add_(exps, v, hidden, self.weight, *sums, self.start)
        self.start += len(exps)

    def sums(self):
        """(dH, dW, dbias) as they were added up; None where not needed."""
        if self.start == 0:  # no rows
            for total in (self.weight_sum, self.bias_sum):
                if total is not None:
                    total.zero_()
        if self.hidden_sum is not None:
            all_reduce_(self.hidden_sum, self.group)
        return self.hidden_sum, self.weight_sum, self.bias_sum

    def result(self, weight_dtype):
        """As head_products."""
        dh, dw, db = self.sums()
        return (
            self.weight.new_empty(0) if dh is None else dh.to(self.weight.dtype),
            self.weight.new_empty(0, dtype=weight_dtype) if dw is None else dw.to(weight_dtype),
            self.weight.new_empty(0, dtype=torch.float32) if db is None else db,
        )


def grad_dtype(parameter):
    """What the parameter wants its gradient in: a bf16 weight may ask for fp32 (torch 2.10 and later)."""
    if torch.compiler.is_compiling() or not parameter.is_leaf:  # not traceable; only leaves have a choice
        return parameter.dtype
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def wanted(gradients, needs, bias_dtype):
    """(dH, dW, dbias), None where not needed."""
    dh, dw, db = gradients
    return dh if needs[0] else None, dw if needs[1] else None, db.to(bias_dtype) if needs[2] else None
