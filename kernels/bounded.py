"""A backward of the head over the vocabulary columns that matter, with a bound on what it leaves out of every row.

The gradient of a row's loss by its logits is

    dz_n = g_n (onehot_t - p_n) / T,   so   |dz_n|_1 = 2 |g_n| m_n / T,   with   m_n = sum_{v != t} p_nv = 1 - p_nt

and nearly all of m_n lies on few columns v. A chunk of rows leaves out a set L of columns that holds no row's target,
as large as the bound allows with the tolerance tau:

    sum_{v in L} p_nv <= tau m_n     for every row n with g_n != 0

What dz_n lacks is then at most tau |g_n| m_n / T in the 1-norm, which is tau / 2 of |dz_n|_1 whatever the row's
confidence is. So dH_n = dz_n W errs by at most (tau |g_n| m_n / T) max_{v in L} |W_v|, and dW = dz^T H by at most
sum_n (tau |g_n| m_n / T) |h_n|, added up over its rows. A soft-cap multiplies the columns by slopes of at most 1 and
leaves both as they are. Log-probs, loss and metrics are those of the exact path.

L is the longest beginning of the columns in the order of what they contribute, sum_n |g_n| p_nv / m_n. A vocabulary
that is sharded over ranks bounds the mass of each shard by tau times the shard's own part of m_n, which adds up to the
bound without an exchange.

Shapes: n rows of the chunk (one a token), V vocabulary entries here, K <= V kept ones.
"""

from typing import NamedTuple

import torch

from fastgrpo.kernels.softmax import Vocabulary

GROUPS = 32  # the columns are first left out in this many groups, then one by one within the group that holds the bound
MOST_KEPT = 0.9  # where more of the columns stay, the products over all of them are as fast
ROUNDING = 1 - 2**-10  # of tau, so that sums rounded to fp32 do not exceed it


class Bounded(NamedTuple):
    """The gradient of a chunk by its logits, over the columns that it keeps.

    Attributes:
        dz: [n, K] in the order of `columns`; None where too many columns stay, and the exact path is to be taken.
        columns: [K] int64, rising.
        kept: Scalar, the share of the vocabulary that is kept, over all ranks.
        dropped: [n] the mass that was left out of each row, as a share of m_n; at most tau.
    """

    dz: torch.Tensor | None
    columns: torch.Tensor | None
    kept: torch.Tensor
    dropped: torch.Tensor


def bounded_gradient(
    probs: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, g: torch.Tensor, tolerance: float,
    bend: torch.Tensor | None = None,
) -> Bounded:  # fmt: skip
    """Form the gradient of a chunk by its logits over the columns that matter.

    The number of columns decides shapes, so that on a GPU the host waits for it, once a chunk.

    Args:
        probs: [n, V] probabilities; they stay as they are.
        targets: [n] int64 ids of the whole vocabulary.
        vocabulary: Which part of it `probs` covers.
        g: [n] gradient of the log-prob, divided by the temperature.
        tolerance: tau, above 0.
        bend: [n, V] slope of the soft-cap, or None.
    """
    g, size = g.to(probs.dtype), probs.shape[-1]
    local, mine = vocabulary.local(targets, size)
    own = probs.gather(-1, local[:, None])
    probs.scatter_(-1, local[:, None], own.masked_fill(mine[:, None], 0))  # m_n without the cancellation of 1 - p_nt
    mass = probs.sum(-1)
    order, free = _order(probs, local, mine, torch.where(mass > 0, g.abs() / mass, 0))
    limit = torch.where(g != 0, tolerance * ROUNDING * mass, torch.inf)
    count, dropped = _longest(probs, order, free, limit)
    probs.scatter_(-1, local[:, None], own)
    exact = count < (1 - MOST_KEPT) * size
    kept, dropped = probs.new_tensor(size if exact else size - count), dropped * (g != 0) * (not exact)
    kept, dropped, mass = vocabulary.sum_(kept), vocabulary.sum_(dropped), vocabulary.sum_(mass)
    kept, dropped = kept / vocabulary.total, torch.where(mass > 0, dropped / mass, 0)
    if exact:
        return Bounded(None, None, kept, dropped)
    columns = order[count:].sort().values
    dz = probs.index_select(-1, columns).mul_(-g[:, None])  # many times faster than indexing
    if len(columns):  # a shard that holds no target may keep none
        place = torch.searchsorted(columns, local).clamp_(max=len(columns) - 1)
        dz.scatter_add_(-1, place[:, None], torch.where(mine, g, 0)[:, None])
    if bend is not None:
        dz *= bend.index_select(-1, columns)
    return Bounded(dz, columns, kept, dropped)


def _order(probs, local, mine, weights):
    """Sort the columns by what they contribute, targets last. Returns them, and how many are no target's."""
    score = weights @ probs
    score.scatter_reduce_(0, local, torch.where(mine, torch.inf, 0).to(score), "amax")
    return score.argsort(stable=True), (score < torch.inf).sum()


def _longest(probs, order, free, limit):
    """Find how many columns at the beginning of `order` have no more mass than `limit` [n] in any row.

    Returns:
        Their number, at most `free`, and their mass in each row [n].
    """
    size, step = len(order), -(-len(order) // GROUPS)
    members = probs.new_zeros(size, GROUPS)
    members[order, torch.arange(size, device=order.device) // step] = 1
    masses = torch.nn.functional.pad((probs @ members).cumsum(-1), (1, 0))  # [n, 1 + GROUPS] before each group
    fits = (masses[:, 1:] <= limit[:, None]).all(0).cumprod(0).sum().minimum(free // step)
    whole = int(fits)
    inside = order[whole * step : (whole + 1) * step]
    rising = probs.index_select(-1, inside).cumsum(-1) + masses[:, whole, None]
    further = (rising <= limit[:, None]).all(0).cumprod(0).sum()
    further = int(further.minimum(free - whole * step))
    return whole * step + further, rising[:, further - 1] if further else masses[:, whole]
