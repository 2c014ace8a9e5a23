"""A backward of the head's kernels over the vocabulary columns that matter: E with fewer columns, within a bound.

bounded.py states what a chunk may leave out, and the bound: columns L without a target, of every row at most the share
tau of its m_n = 1 - p_nt. Each row of E (linear_logprob.py) is p_nv times a factor r_n of the row, so that two products
of the library, which read E once each, are all that the choice takes:

    (|g| / (r m))^T E   what each column contributes, by which the columns are sorted
    E C                 r_n times the mass of the row's first d_j columns in that order; C [V, J] holds ones and zeros

d_1 < d_2 < ... are a ladder of `STEPS` numbers: 0.9 V columns stay or fewer, down to V / 256, by a tenth less each. The
largest d_j that is within the bound in every row is left out. The host waits for j, once a chunk. Then
`_keep_columns_kernel` moves the columns that stay side by side, and the products of the gradient run over E[:, :K]
and W[columns]. Where no step of the ladder fits, they run over everything.

E is held so that its masses hold up. Where it is recomputed, r_n = 2^15 / m_n instead of 1: p_nv itself would vanish in
fp16 where m_n is small. Under a soft-cap E comes without its slope, which would make masses look smaller than they are;
`_keep_columns_kernel` multiplies the slope in, of the logit that it finds by the logarithm of E. In both cases, the
target's entry of E is the one of `head_rows.Rows.patch`, which is negative.

Shapes: n rows of the chunk (one a token), V vocabulary entries here, K <= V kept ones, J steps, D hidden size.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch
from fastgrpo.kernels.bounded import MOST_KEPT
from fastgrpo.kernels.head_gradients import head_products
from fastgrpo.kernels.head_rows import Rows
from fastgrpo.kernels.linear_exp import empty_exps, linear_exp_fwd
from fastgrpo.kernels.products import bias_product, mm_fp32, no_autocast
from fastgrpo.kernels.softmax import all_reduce_
from fastgrpo.kernels.tiles import ROWS_VARY, Head, row_scale

Tensor = torch.Tensor

STEPS = 63  # with the column of C that sums a whole row, a multiple of 8, as the library's fast products want it
FEWEST_KEPT = 1 / 256  # of the vocabulary; with so few columns the products cost nothing beside that of the forward
MULTIPLE = 16  # of which K is one, for the library's fast products


class Choice(NamedTuple):
    """Which columns a chunk keeps.

    Attributes:
        columns: [V] int64, of which the first `count` are the kept columns, rising.
        count: K; V where too many would stay, and `columns` is then without meaning.
        dropped: [n] fp32 mass of the columns left out, in the unit of E.
        mass: [n] fp32 mass of all columns but the target's, in the unit of E.
    """

    columns: Tensor
    count: int
    dropped: Tensor
    mass: Tensor


@cache
def ladder(vocab: int) -> tuple[int, ...]:
    """Return how many columns may be left out, rising."""
    ratio = (FEWEST_KEPT / MOST_KEPT) ** (1 / (STEPS - 1))
    kept = {int(MOST_KEPT * vocab * ratio**step) // MULTIPLE * MULTIPLE for step in range(STEPS)}
    return tuple(sorted(vocab - count for count in kept if count))


@cache
def _ladder_on(vocab, device):
    return torch.tensor(ladder(vocab), device=device, dtype=torch.int64)


def choose_columns(exps: Tensor, targets: Tensor, rows: Rows, g: Tensor, tolerance: float) -> Choice:
    """Choose the columns that a chunk keeps. The host waits for their number.

    Args:
        exps: [n, V] E, with the slope of no soft-cap. Its values are the same before and after.
        targets: [n] int64 ids within the shard.
        rows: What the forward computed, of this E.
        g: [n] fp32, gradient of the log-probs.
        tolerance: tau, above 0.
    """
    n, vocab = exps.shape
    if n == 0:
        return Choice(targets.new_zeros(vocab), vocab, *g.new_zeros(2, 0))
    exps = exps.data  # without the count of changes by which autograd would take a saved E for another one
    mine = (targets >= 0) & (targets < vocab)
    place = torch.where(mine, targets, 0)[:, None]
    own = exps.gather(1, place)
    exps.scatter_(1, place, own.masked_fill(mine[:, None], 0))
    others = -torch.expm1(rows.logp)  # m_n, to full relative precision
    score = bias_product(exps, torch.where(others > 0, g.abs() / (rows.norm * others.clamp(min=1e-30)), 0))
    score = torch.nn.functional.pad(score, (0, 1)).index_fill_(0, torch.where(mine, targets, vocab), torch.inf)[:vocab]
    order, free = score.argsort(stable=True), (score < torch.inf).sum()  # targets come last, and are never left out
    left_out = _ladder_on(vocab, exps.device)
    # A product with the running sums in C needs no cumsum, whose order of summation torch does not fix on a GPU.
    within = torch.arange(vocab, device=exps.device)[:, None] < torch.nn.functional.pad(left_out, (0, 1), value=vocab)
    members = torch.empty(within.shape, dtype=exps.dtype, device=exps.device)
    masses = mm_fp32(exps, members.index_copy_(0, order, within.to(exps.dtype)))
    exps.scatter_(1, place, own)
    mass = masses[:, -1]
    limit = torch.where(g != 0, tolerance * (1 - rounding(exps.dtype)) * mass, torch.inf)
    fits = (masses[:, :-1] <= limit[:, None]).all(0) & (left_out <= free)  # NaN fits nowhere
    step = int((fits * torch.arange(1, len(fits) + 1, device=fits.device)).amax()) if len(fits) else 0
    columns = torch.zeros_like(order)
    if step == 0:
        return Choice(columns, vocab, torch.zeros_like(mass), mass)
    first = ladder(vocab)[step - 1]
    columns[: vocab - first] = order[first:].sort().values
    return Choice(columns, vocab - first, masses[:, step - 1] * (g != 0), mass)


def rounding(dtype: torch.dtype) -> float:
    """Return the share of tau that makes up for the rounding of E and of its sums, so that the bound holds for p."""
    return max(2**-9, torch.finfo(dtype).eps)  # also where products of fp32 round to TF32


@triton.jit(**ROWS_VARY)
def _keep_columns_kernel(e_ptr, e_stride, out_ptr, out_stride, column_ptr, anchor_ptr, inv_t, inv_t_ptr, cap, n_rows,
                         count, BLOCK: tl.constexpr):  # fmt: skip
    """Write some columns of one row of E side by side, times the soft-cap's slope. out may be E itself.

    In place, a block is stored where later ones do not read any more: rising columns lie at or behind their new places.
    """
    row = tl.program_id(0).to(tl.int64)
    one = row + tl.arange(0, 1)
    if cap is not None:
        anchor = tl.load(anchor_ptr + one)
        scale = row_scale(inv_t, inv_t_ptr, one, n_rows)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        column = place
        if column_ptr is not None:
            column = tl.load(column_ptr + place, mask=place < count, other=0)
        e = tl.load(e_ptr + row * e_stride + column, mask=place < count, other=0.0)
        if cap is not None:
            x = e.to(tl.float32)
            y = anchor + tl.log2(tl.maximum(x, 1.2e-38)) / scale
            slope = tl.maximum(1.0 - (y / cap) * (y / cap), 0.0)
            e = tl.where(x > 0, x * slope, x).to(e_ptr.dtype.element_ty)  # the target's entry has its slope
        tl.debug_barrier()  # other warps of the row have read what this one writes over
        tl.store(out_ptr + row * out_stride + place, e, mask=place < count)


def keep_columns(
    exps: Tensor, choice: Choice, rows: Rows, temperature: float, temperatures: Tensor | None, softcap: float | None,
    inplace: bool,
) -> Tensor:  # fmt: skip
    """Bring E into the form of the gradient: with the chosen columns alone, and with the slope of the soft-cap.

    Args:
        exps: [n, V] E, without that slope.
        choice: Which columns are kept.
        rows: What the forward computed, of this E.
        temperature: T of all rows, read where `temperatures` is None.
        temperatures: [n] T of each row, or None.
        softcap: Cap of the logits, or None.
        inplace: Whether E may be overwritten.

    Returns:
        [n, V], whose first K columns are those of the choice: `exps` itself, or with `inplace` False a tensor [n, K]
        where E has to change.
    """
    n, vocab = exps.shape
    everything = choice.count == vocab
    if n == 0 or (everything and softcap is None):
        return exps
    out = exps if inplace else empty_exps(n, choice.count, exps)
    inverse = None if temperatures is None else temperatures.float().reciprocal()
    _keep_columns_kernel[(n,)](
        exps, exps.stride(0), out, out.stride(0), None if everything else choice.columns, rows.anchor,
        1.0 / temperature, inverse, softcap, n, choice.count, BLOCK=launch.columns_block(),
    )  # fmt: skip
    return out


@launch.operator("fastgrpo::head_columns_", mutates_args=("exps",))
def head_columns_(exps: Tensor, targets: Tensor, rows: Tensor, g: Tensor, temperature: float,
                  temperatures: Tensor | None, softcap: float | None, tolerance: float,
                  group: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Choose the columns of a chunk, and bring E into the form of the gradient in place, see `keep_columns`.

    Args:
        exps: [n, V] E.
        targets: [n] int64 ids within the shard.
        rows: [7, n] fp32, `head_rows.Rows` of this E.
        g: [n] fp32, gradient of the log-probs.
        temperature: T of all rows, read where `temperatures` is None.
        temperatures: [n] T of each row, or None.
        softcap: Cap of the logits, or None.
        tolerance: tau, above 0.
        group: Name of the process group of a sharded weight, or None.

    Returns:
        Columns and count, [V] and [1] (on the CPU) int64, see `Choice`; the kept share of the vocabulary over all
        ranks, a scalar; and the mass left out of each row [n], as a share of m_n.
    """
    stats = Rows(*rows.unbind(0))
    choice = choose_columns(exps, targets, stats, g, tolerance)
    keep_columns(exps, choice, stats, temperature, temperatures, softcap, True)
    sizes = all_reduce_(rows.new_tensor([choice.count, exps.shape[1]]), group)
    dropped, mass = all_reduce_(torch.stack([choice.dropped, choice.mass]), group)
    share = torch.where(dropped > 0, dropped / mass, 0)
    return choice.columns, torch.tensor([choice.count]), sizes[0] / sizes[1], share


@head_columns_.register_fake
def _(exps, targets, rows, g, temperature, temperatures, softcap, tolerance, group):
    count = torch.empty(1, dtype=torch.int64, device="cpu")
    return targets.new_empty(exps.shape[1]), count, rows.new_empty(()), torch.empty_like(g)


@launch.operator("fastgrpo::head_products_within")
def head_products_within(exps: Tensor, targets: Tensor, rows: Tensor, g: Tensor, hidden: Tensor, weight: Tensor,
                         temperature: float, temperatures: Tensor | None, softcap: float | None, tolerance: float,
                         needs: list[bool], weight_dtype: torch.dtype,
                         group: str | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of hidden, weight and bias from exponentials that stay as they are, over fewer columns.

    Args:
        exps: [n, V] E.
        targets: [n] int64 ids within the shard.
        rows: [7, n] fp32, `head_rows.Rows` of this E.
        g: [n] fp32, gradient of the log-probs.
        hidden: [n, D].
        weight: [V, D] in the dtype of hidden.
        temperature: T of all rows, read where `temperatures` is None.
        temperatures: [n] T of each row, or None.
        softcap: Cap of the logits, or None.
        tolerance: tau, above 0.
        needs: Which of the three gradients are needed.
        weight_dtype: Dtype of dW.
        group: Name of the process group over whose ranks dH is summed, or None.

    Returns:
        dH [n, D], dW [V, D] and dbias [V], as `head_products` returns them.
    """
    stats = Rows(*rows.unbind(0))
    choice = choose_columns(exps, targets, stats, g, tolerance)
    kept = keep_columns(exps, choice, stats, temperature, temperatures, softcap, False)
    return head_products(kept, g * stats.slope, hidden, weight, needs, weight_dtype, group, choice.columns,
                         torch.tensor([choice.count]))  # fmt: skip


@head_products_within.register_fake
def _(exps, targets, rows, g, hidden, weight, temperature, temperatures, softcap, tolerance, needs, weight_dtype,
      group):  # fmt: skip
    return (
        hidden.new_empty(hidden.shape if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0, dtype=weight_dtype),
        rows.new_empty(weight.shape[0] if needs[2] else 0),
    )


@launch.operator("fastgrpo::head_shares")
def head_shares(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
                temperatures: Tensor | None, softcap: float | None,
                rows: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Recompute E for a choice of columns: probabilities as shares of their row's m_n, without a soft-cap's slope.

    Args:
        hidden: [n, D] bf16, fp16 or fp32.
        weight: [V, D] in the dtype of hidden.
        bias: [V] or None.
        targets: [n] int64 ids within the shard.
        temperature: T of all rows, read where `temperatures` is None.
        temperatures: [n] T of each row, or None.
        softcap: Cap of the logits, or None.
        rows: [7, n] fp32, `head_rows.Rows` of the forward.

    Returns:
        E [n, V], and `head_rows.Rows` of this E, [7, n] fp32.
    """
    exps = empty_exps(len(hidden), weight.shape[0], weight)
    stats = Rows(*rows.unbind(0)).shares()
    if len(hidden):
        with no_autocast(hidden):
            head = Head(hidden, weight, bias, targets, temperature, temperatures, softcap).checked()
            linear_exp_fwd(head, stats.anchor, exps, patch=stats.patch, sums=False, bend=False)
    return exps, torch.stack(stats)


@head_shares.register_fake
def _(hidden, weight, bias, targets, temperature, temperatures, softcap, rows):
    return empty_exps(len(hidden), weight.shape[0], weight), torch.empty_like(rows)
