"""Products 2 and 3 of the head as operators, at once or summed over chunks, and what autograd receives of them.

    dH = v (E W),   dW = E^T (v H),   dbias = E^T v          (E and v: linear_logprob.py)

`group` names the process group over which the rows of the weight are sharded, or is None. dH is summed over its ranks,
once and in fp32; dW and dbias stay with their shard.

Where a choice of columns is given (head_columns.py), E holds K columns side by side, and all others add nothing: the
products run over the same rows of the weight, and over those of dW.

Shapes: n rows of a chunk of hidden states, M rows over all chunks, V vocabulary, K <= V kept columns, D hidden size.
"""

from collections.abc import Sequence

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
                  weight_dtype: torch.dtype, group: str | None, columns: Tensor | None = None,
                  count: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of hidden, weight and bias from kept exponentials.

    Args:
        exps: [n, V] E; with `columns`, of which the first K count.
        v: [n] fp32.
        hidden: [n, D].
        weight: [V, D] in the dtype of hidden.
        needs: Which of the three gradients are needed.
        weight_dtype: Dtype of dW.
        group: Name of the process group of a sharded weight, or None.
        columns: [V] int64, whose first K are the columns of E, rising; None where E has all columns.
        count: [1] int64 on the CPU, K.

    Returns:
        dH [n, D], dW [V, D] in weight_dtype and dbias [V] fp32, each empty where not needed.
    """
    if len(hidden) == 0:
        return HeadGradients(0, weight, needs).result(weight_dtype)
    size = len(weight)
    exps, ids = _kept(exps, size, columns, count)
    with no_autocast(hidden):
        return (
            hidden_product(exps, v, _rows(weight, ids), group) if needs[0] else hidden.new_empty(0),
            _spread(weight_product(exps, v, hidden, weight_dtype), ids, size)
            if needs[1]
            else weight.new_empty(0, dtype=weight_dtype),
            _spread(bias_product(exps, v), ids, size) if needs[2] else v.new_empty(0),
        )


def _kept(exps, size, columns, count):
    """Return the kept columns of E [n, K], and their ids [K], or None where all of the vocabulary's `size` stay."""
    kept = size if count is None else int(count)
    return (exps, None) if kept == size else (exps[:, :kept], columns[:kept])


def _rows(matrix, ids):
    """Return some rows of a matrix, or the matrix itself where `ids` is None."""
    return matrix if ids is None else matrix.index_select(0, ids)


def _spread(values, ids, size):
    """Return `size` rows, which are `values` at `ids` and else 0; or `values` themselves where `ids` is None."""
    return values if ids is None else values.new_zeros(size, *values.shape[1:]).index_copy_(0, ids, values)


@head_products.register_fake
def _(exps, v, hidden, weight, needs, weight_dtype, group, columns=None, count=None):
    return (
        hidden.new_empty(hidden.shape if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0, dtype=weight_dtype),
        v.new_empty(weight.shape[0] if needs[2] else 0),
    )


@launch.operator("fastgrpo::head_products_add_", mutates_args=("hidden_sum", "weight_sum", "bias_sum"))
def head_products_add_(exps: Tensor, v: Tensor, hidden: Tensor, weight: Tensor, hidden_sum: Tensor | None,
                       weight_sum: Tensor | None, bias_sum: Tensor | None, start: int, columns: Tensor | None = None,
                       count: Tensor | None = None) -> None:  # fmt: skip
    """Compute the same for one chunk: write its rows of dH, and add its dW and dbias.

    The first chunk, which starts at row 0, overwrites dW and dbias, so that they need not be zeroed before.

    Args:
        exps: [n, V] E of the chunk; with `columns`, of which the first K count.
        v: [n] fp32.
        hidden: [n, D].
        weight: [V, D] in the dtype of hidden.
        hidden_sum: [M, D], in which rows `start` to `start` + n are written, or None.
        weight_sum: [V, D] fp32, or None.
        bias_sum: [V] fp32, or None.
        start: The chunk's first row among all.
        columns: [V] int64, whose first K are the columns of E, rising; None where E has all columns.
        count: [1] int64 on the CPU, K.
    """
    first = start == 0
    exps, ids = _kept(exps, len(weight), columns, count)
    with no_autocast(hidden):
        if weight_sum is not None and ids is None:
            add_weight_product_(weight_sum, exps, v, hidden, first)
        elif weight_sum is not None:
            if first:
                weight_sum.zero_()
            part = add_weight_product_(weight_sum.index_select(0, ids), exps, v, hidden, first)
            weight_sum.index_copy_(0, ids, part)  # a column stands in `ids` once
        if bias_sum is not None:
            product = _spread(bias_product(exps, v), ids, len(weight))
            bias_sum.copy_(product) if first else bias_sum.add_(product)
        if hidden_sum is not None:
            part = hidden_sum[start : start + len(exps)]
            if part.dtype == torch.float32:
                mm_fp32(exps, _rows(weight, ids), out=part).mul_(v[:, None])
            else:
                torch.mul(mm_fp32(exps, _rows(weight, ids)), v[:, None], out=part)


class HeadGradients:
    """dH [M, D], dW [V, D] and dbias [V] over several chunks, added from the first row to the last.

    dW and dbias add up in fp32. dH is in the dtype of hidden, or in fp32 where ranks add to it or where it is scaled
    later, because rounding both before and after a factor would lose precision.

    Args:
        rows: M, the rows of hidden over all chunks.
        weight: [V, D] in the dtype of hidden.
        needs: Which of the gradients of hidden, weight and bias are needed.
        group: Name of the process group of a sharded weight, or None.
        scaled: Whether the sums are multiplied by grad_output later.
    """

    def __init__(
        self, rows: int, weight: Tensor, needs: Sequence[bool], group: str | None = None, scaled: bool = False
    ) -> None:
        self.weight, self.group, self.start = weight, group, 0
        fp32 = {"dtype": torch.float32, "device": weight.device}
        dtype = torch.float32 if scaled or group is not None else weight.dtype
        shape = rows, weight.shape[1]
        self.hidden_sum = torch.empty(shape, dtype=dtype, device=weight.device) if needs[0] else None
        self.weight_sum = torch.empty(weight.shape, **fp32) if needs[1] else None
        self.bias_sum = torch.empty(weight.shape[0], **fp32) if needs[2] else None

    def add(
        self, exps: Tensor, v: Tensor, hidden: Tensor, columns: Tensor | None = None, count: Tensor | None = None
    ) -> None:
        """Add the next n rows.

        Args:
            exps: [n, V] E of these rows.
            v: [n] fp32.
            hidden: [n, D].
            columns: [V] int64, as `head_products` takes them, or None.
            count: [1] int64 on the CPU, or None.
        """
        sums = self.hidden_sum, self.weight_sum, self.bias_sum
        head_products_add_(exps, v, hidden, self.weight, *sums, self.start, columns, count)
        self.start += len(exps)

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return (dH, dW, dbias) as they were added up, None where not needed."""
        if self.start == 0:  # there were no rows, and so no first chunk that writes
            for total in (self.weight_sum, self.bias_sum):
                if total is not None:
                    total.zero_()
        if self.hidden_sum is not None:
            all_reduce_(self.hidden_sum, self.group)
        return self.hidden_sum, self.weight_sum, self.bias_sum

    def result(self, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dH, dW, dbias) in the form of `head_products`."""
        dh, dw, db = self.sums()
        return (
            self.weight.new_empty(0) if dh is None else dh.to(self.weight.dtype),
            self.weight.new_empty(0, dtype=weight_dtype) if dw is None else dw.to(weight_dtype),
            self.weight.new_empty(0, dtype=torch.float32) if db is None else db,
        )


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter wants its gradient: a bf16 weight may ask for fp32 (from torch 2.10 on)."""
    # The attribute cannot be traced, and only leaves have it.
    if torch.compiler.is_compiling() or not parameter.is_leaf:
        return parameter.dtype
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def wanted(
    gradients: tuple[Tensor, Tensor, Tensor], needs: Sequence[bool], bias_dtype: torch.dtype | bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return what autograd receives, None where a gradient is not needed."""
    dh, dw, db = gradients
    return dh if needs[0] else None, dw if needs[1] else None, db.to(bias_dtype) if needs[2] else None
