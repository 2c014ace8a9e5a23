"""The head's loss and log-probs without Triton: the results of reference.py, in the memory of one chunk of rows.

Shapes: N rows (one a token), M <= N kept rows, V vocabulary, D hidden, S sequences. Three matrix products in all:

    z = (H W^T + b) / T,   logp = z_t - logsumexp(z),   g = dloss/dlogp,
    dz = g (onehot_t - softmax(z)) / T,   dH = dz W,   dW = dz^T H

A GRPO gradient is separable by row: g follows from logp, so the forward overwrites the logits with dz. If one chunk
holds all rows, the forward keeps dz and the backward runs the last two products, so that nothing is wasted inside a
checkpointed region. With several chunks, the forward runs these products per chunk and keeps dH and dW. The KL of the
full distributions (`full_kl`) needs one more product, of the reference's states with its head, and adds its part to dz.
With a tolerance, the last two products use fewer columns (`Bounded`). A weight whose rows are sharded over processes
(vocabulary-parallel) adds all-reduces of per-row values (`softmax_`) and of dH; dW and dbias stay sharded.

On a GPU, 16-bit states and weights are multiplied as they are, with fp32 sums; dz is rounded to 16 bits for its two
products, as autograd rounds it. A CPU has no such product: it casts the weight, a block at a time.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from fastgrpo.kernels.objectives import (
    compute_dtype,
    constant,
    cut,
    first_order,
    no_autocast,
    policy_loss_fwd,
    policy_parts,
)

GPUS = ("cuda", "meta")  # devices treated as GPUs; tests count the products of a GPU with meta tensors
CAST_ROWS = 8192  # rows of a 16-bit weight cast to fp32 at a time on a GPU
CAST_BYTES = 2 * 2**20  # fp32 bytes cast at a time on a CPU; they stay in its cache until the product reads them


@constant
def _multiplies(kind: str, dtype: torch.dtype) -> bool:
    """Return whether a kind of device multiplies 16-bit operands fast; before sm_80, a GPU emulates bf16."""
    if kind not in GPUS or dtype.itemsize != 2:
        return False
    return kind == "meta" or dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)


def operand_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of the operands of a head's products: 16 bits if both have them on a GPU, else fp32 or fp64."""
    same = hidden.dtype == weight.dtype
    return hidden.dtype if same and _multiplies(hidden.device.type, hidden.dtype) else compute_dtype(hidden)


def mm_fp32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply a [n, k] by b [k, m] of the same dtype with fp32 output [n, m], or fp64 for fp64.

    A CPU, as in the interpreted tests, has no such product for 16-bit operands, so they are cast.
    """
    if a.device.type in GPUS and a.itemsize == 2:
        if out is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    dtype = compute_dtype(a)
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def weight_blocks(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield a weight in blocks of rows cast to a dtype, or as one block if it has that dtype.

    A full copy would take twice the memory of a 16-bit weight. On a CPU, writing it to memory and reading it back also
    takes several times as long as the product with the few rows of a decode step.
    """
    step = max(1, CAST_BYTES // (4 * weight.shape[1])) if weight.device.type == "cpu" else CAST_ROWS
    step = len(weight) if weight.dtype == dtype else step
    for start in range(0, len(weight), step):
        yield slice(start, start + step), weight[start : start + step].to(dtype)


def linear_fp32(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute states @ weight.T with fp32 output, also on a CPU, where 16-bit products have 16-bit output."""
    if states.dtype == torch.float64:
        return (states @ weight.T).float()
    if states.is_cuda or states.dtype == torch.float32:
        return mm_fp32(states, weight.T)
    states = states.float()
    out = torch.empty(len(states), len(weight), dtype=torch.float32, device=states.device)
    for rows, block in weight_blocks(weight, torch.float32):
        out[:, rows] = states @ block.T
    return out


def add_mm_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute total += a @ b in fp32 (fp64 for fp64), in place; on a GPU without a second tensor of this size."""
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    if a.device.type in GPUS:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(mm_fp32(a, b))


def hidden_product(
    exps: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, group: str | None = None
) -> torch.Tensor:
    """Write dH = v (E W) to `out`, computed in fp32, summed over the ranks of `group`, and rounded once."""
    product = mm_fp32(exps, weight, out=out if out.dtype == torch.float32 else None)
    if group is None:
        return torch.mul(product, v[:, None], out=out)
    return out.copy_(all_reduce_(product.mul_(v[:, None]), group))


def add_weight_product_(
    total: torch.Tensor, exps: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, first: bool
) -> torch.Tensor:
    """Add a chunk to dW [V, D] fp32: total += E^T (v H). The first chunk overwrites it, so that it need not be zeroed.

    If there is only one chunk, it may be written in the dtype of E.
    """
    scaled = torch.mul(hidden, v[:, None], out=torch.empty_like(hidden))
    if not first:
        return add_mm_(total, exps.T, scaled)
    if total.dtype == exps.dtype:
        return torch.mm(exps.T, scaled, out=total)
    return mm_fp32(exps.T, scaled, out=total)


def bias_product(exps: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute dbias = E^T v in fp32, from E [n, V] and v [n]."""
    # v is scaled so that its largest entry is 1, which every dtype can represent. Rounding v to bf16 would add an error
    # as large as the rounding error of E. As a sum of two bf16 columns, v has an error of 2^-17. One product reads E
    # once for both columns.
    factor = v.abs().amax().clamp(min=1e-30)
    high = (v / factor).to(exps.dtype)
    low = (v / factor - high).to(exps.dtype)
    return mm_fp32(exps.T, torch.stack([high, low], 1)).sum(1) * factor


# Replace a target's id within the shard if another rank holds the target, or if no rank does.
ELSEWHERE, NOWHERE = -1, -2


def all_reduce_(
    values: torch.Tensor, group: dist.ProcessGroup | str | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduce `values` in place over the ranks of `group`, and return them. A group of None changes nothing.

    `group` may be a name, for operators of torch.library, which cannot take a group.
    """
    if group is not None:
        group = dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
        dist.all_reduce(values, op=op, group=group)
    return values


class Vocabulary(NamedTuple):
    """The shard of the vocabulary on this process.

    Targets are ids of the full vocabulary, and per-row values are equal on all ranks.
    """

    first: int  # id of the first entry of the shard
    total: int  # number of entries over all ranks
    largest: int  # number of entries of the largest shard
    group: dist.ProcessGroup | None  # of the shards, in rank order; None if this process has all entries

    @classmethod
    def of(cls, weight: torch.Tensor, group: dist.ProcessGroup | None) -> "Vocabulary":
        """Return the shard of this rank, from its weight [V, D]. The ranks exchange their sizes, which is a sync."""
        if group is None:
            if not weight.shape[0]:
                raise ValueError("weight must hold at least one row, got none")
            return cls(0, weight.shape[0], weight.shape[0], None)
        size = torch.tensor([weight.shape[0]], device=weight.device)
        sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, size, group=group)
        sizes = torch.cat(sizes).tolist()
        if min(sizes) < 1:
            raise ValueError(f"weight must hold at least one row on every rank of process_group, got {sizes} rows")
        return cls(sum(sizes[: dist.get_rank(group)]), sum(sizes), max(sizes), group)

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor of the same shape on every rank over the ranks, in place."""
        return all_reduce_(values, self.group)

    def max_(self, values: torch.Tensor) -> torch.Tensor:
        """Reduce a tensor of the same shape on every rank to the maximum over the ranks, in place."""
        return all_reduce_(values, self.group, dist.ReduceOp.MAX)

    def local(self, targets: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert targets [n] of the full vocabulary to ids within this shard of `size` entries.

        Returns ids clamped to the shard, and whether this rank holds each target (bool).
        """
        local = targets - self.first
        return local.clamp(0, size - 1), (local >= 0) & (local < size)

    def located(self, targets: torch.Tensor, size: int) -> tuple[torch.Tensor, str | None]:
        """Convert targets to ids within the shard, and the group to its name, for operators of torch.library.

        Other ranks' targets become ELSEWHERE, and invalid ones NOWHERE. Without a group, targets are not changed.
        """
        if self.group is None:
            return targets, None
        local, mine = self.local(targets, size)
        legal = (targets >= 0) & (targets < self.total)
        return torch.where(mine, local, torch.where(legal, ELSEWHERE, NOWHERE)), self.group.group_name


def softmax_(
    z: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, return_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the softmax in place, and log-probs and entropy.

        logp = z_t - log sum_v e^z_v,   H = -sum_v p_v log p_v

    For a sharded vocabulary there are three all-reduces: of the maxima; of the sums and the targets' logits (0 on other
    ranks); and of the sums for the entropy.

    `z` [n, V] holds logits divided by the temperature, and becomes the probabilities. The entropy is in nats.
    """
    top = vocabulary.max_(z.amax(-1))
    local, mine = vocabulary.local(targets, z.shape[-1])
    # A target outside the vocabulary gives NaN. Values on a GPU are not validated.
    elsewhere = torch.where((targets >= 0) & (targets < vocabulary.total), 0.0, torch.nan).to(z.dtype)
    shifted_target = torch.where(mine, z.gather(-1, local[:, None])[:, 0] - top, elsewhere)
    if z.is_cpu and vocabulary.group is None:
        # One pass over each row in the cache. The largest probability is e^0 over the sum.
        torch.softmax(z, -1, out=z)
        log_total = -z.amax(-1).log()
    else:
        z -= top[:, None]
        shifted_target, total = vocabulary.sum_(torch.stack([shifted_target, z.exp_().sum(-1)]))
        z /= total[:, None]
        log_total = total.log()
    entropy = vocabulary.sum_(_entropy(z)) if return_entropy else None
    return shifted_target - log_total, entropy


def _entropy(probs):
    """Compute -sum_v p_v log p_v [n]. On a CPU, parts that stay in the cache are several times faster.

    p log p is 0 at p = 0, so logits of -inf are legal.
    """
    tiny = torch.finfo(probs.dtype).tiny
    parts = probs.split(max(1, 2**17 // probs.shape[1])) if probs.is_cpu else (probs,)
    return -torch.cat([part.clamp(min=tiny).log_().mul_(part).sum(-1) for part in parts])


def logit_gradient_(
    probs: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, g: torch.Tensor,
    entropy: torch.Tensor | None = None, h: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute the gradient by the logits, in place of the probabilities.

        dz = g dlogp/dz + h dH/dz,   dlogp/dz = onehot_t - p,   dH/dz = -p (log p + H)

    `probs` [n, V] is overwritten with dz. With h, `entropy` [n] in nats is needed.
    """
    g = g.to(probs.dtype)
    if h is None:
        probs *= -g[:, None]
    else:  # -p (g + h H) + h (-p log p), without log p where p is 0
        slope = torch.special.entr(probs).mul_(h[:, None])
        probs.mul_(-(g + h * entropy)[:, None]).add_(slope)
    local, mine = vocabulary.local(targets, probs.shape[-1])
    return probs.scatter_add_(-1, local[:, None], torch.where(mine, g, 0.0)[:, None])


class ReferenceHead(NamedTuple):
    """The reference's states and head, without gradient. Its logits get the policy's soft-cap and temperature."""

    hidden: torch.Tensor  # [N, R], the state at each token of the batch
    weight: torch.Tensor  # [V, R]
    bias: torch.Tensor | None  # [V]


def full_kl(probs: torch.Tensor, ref_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute KL(p || q) of each row.

    A token with p = 0 adds 0 (0 log 0), even if q = 0. A token with q = 0 and p > 0 makes the KL infinite.

    Args:
        probs: [n, V] the policy's probabilities p.
        ref_logits: [n, V] the reference's logits divided by the temperature, overwritten with d.

    Returns:
        KL [n] in nats, and d [n, V], 0 where p is 0.
    """
    ref_logits -= ref_logits.logsumexp(-1, keepdim=True)  # log q, because q itself may underflow
    log_ratio = ref_logits.neg_().add_(probs.log()).masked_fill_(probs == 0, 0)  # d = log p - log q
    return (probs * log_ratio).sum(-1), log_ratio  # KL = sum_v p_v d_v


def full_kl_gradient_(probs: torch.Tensor, log_ratio: torch.Tensor, kl: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Compute the gradient by the policy's logits, in place of d [n, V]: g p (d - KL)."""
    return log_ratio.sub_(kl[:, None]).mul_(probs).mul_(g.to(probs.dtype)[:, None])  # g dKL/dz = g p (d - KL)


GROUPS = 32  # columns are dropped in this many groups, then one by one within the group that reaches the bound
MOST_KEPT = 0.9  # if a larger share of the columns is kept, products over all columns are as fast
ROUNDING = 1 - 2**-10  # factor of tau, so that sums rounded to fp32 do not exceed it


class Bounded(NamedTuple):
    """The gradient of a chunk by its logits, over the kept columns."""

    dz: torch.Tensor | None  # [n, K] in the order of `columns`; None: too many are kept, so use the exact path
    columns: torch.Tensor | None  # [K] int64, increasing
    kept: torch.Tensor  # scalar, the kept share of the vocabulary, over all ranks
    dropped: torch.Tensor  # [n] the dropped mass of each row, as a share of m_n = 1 - p_nt; at most tau


def bounded_gradient(
    probs: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, g: torch.Tensor, tolerance: float,
    bend: torch.Tensor | None = None,
) -> Bounded:  # fmt: skip
    """Compute the gradient of a chunk by its logits, without the columns that the tolerance allows to drop.

    The number of columns determines shapes, which costs one sync per chunk on a GPU.

    `probs` is restored before the return. `g` [n] is the gradient of the log-prob, already divided by the temperature.
    `tolerance` is tau of `Bounded`, above 0, and `bend` [n, V] the slope of the soft-cap, or None.
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
    """Sort the columns by their contribution, targets last. Return them, and the number of columns without target."""
    score = weights @ probs
    score.scatter_reduce_(0, local, torch.where(mine, torch.inf, 0).to(score), "amax")
    return score.argsort(stable=True), (score < torch.inf).sum()


def _longest(probs, order, free, limit):
    """Return the length of the longest prefix of `order` whose mass is at most `limit` [n] in every row, and its mass.

    The length is at most `free`. The mass has one value per row [n].
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


CHUNK_BYTES = 64 * 2**20  # bytes of one chunk's fp32 logits: enough for full-speed products, small beside a model
MIN_CHUNK_ROWS = 128
# On a GPU, each chunk adds to the fp32 dW in memory: 15% of an H100's time for the products at 2,048 rows, 8% at 4,096.
GPU_CHUNK_ROWS = 2048, 4096
GPU_SHARE = 32  # the larger chunk is chosen if its fp32 logits take at most this part of the GPU's memory
GATHERED_ROWS = 2048  # rows of a weight gathered at a time for products over some columns


@constant
def _memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory, or 0 if it is not here."""
    here = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).total_memory if here else 0


def chunk_rows(vocab_size: int, device: torch.device | None = None) -> int:
    """Return how many rows a chunk of the head has on a device.

    Without a device, as on a CPU, the fp32 logits of a chunk fill CHUNK_BYTES, with at least MIN_CHUNK_ROWS.
    """
    if device is None or device.type not in GPUS:
        return max(MIN_CHUNK_ROWS, CHUNK_BYTES // (4 * vocab_size))
    few, many = GPU_CHUNK_ROWS
    return many if many * vocab_size * 4 <= _memory(device) // GPU_SHARE else few


def row_slices(total: int, size: int) -> list[slice]:
    """Cut rows into chunks."""
    return [slice(start, min(start + size, total)) for start in range(0, max(total, 1), size)]


def _room(slices, weight, dtype):
    """Allocate memory for the logits of the largest chunk, which all chunks share.

    On a CPU, new memory for each chunk would take a tenth of the time of the product that fills it.
    """
    return torch.empty(max(part.stop - part.start for part in slices), len(weight), dtype=dtype, device=weight.device)


def _logits(hidden, weight, bias, temperature, softcap, room):
    """Compute z [n, V], a view of `room`, and the slope dy/dx [n, V] of the soft-cap, or None.

    hidden has the dtype of the products' operands, and `room` is fp32 or fp64.
    """
    z = room[: len(hidden)]
    for block, w in weight_blocks(weight, hidden.dtype):
        mm_fp32(hidden, w.T, out=z[:, block])  # z = h W^T, product 1
    if bias is not None:
        z += bias.to(z.dtype)
    slope = None
    if softcap is not None:  # y = cap tanh(x / cap), dy/dx = 1 - tanh^2
        z.div_(softcap).tanh_()
        slope = z.square().neg_().add_(1)
        z *= softcap
    if isinstance(temperature, torch.Tensor):
        z /= temperature.to(z.dtype)[:, None]
    elif temperature != 1:
        z /= temperature
    return z, slope


def _narrowed(dz, dtype):
    """Round dz to a dtype of the products. Return it, and the factor that it was divided by, or None.

    The largest entry becomes 1 in fp16, where entries near 1 / tokens would lose bits or become 0.
    """
    if dtype != torch.float16:
        return dz.to(dtype), None
    scale = torch.linalg.vector_norm(dz, torch.inf).clamp(min=1e-30) if dz.numel() else dz.new_ones(())
    return dz.div_(scale).to(dtype), scale


def _scaled(values, scale):
    """Multiply by a factor of `_narrowed`, in place."""
    return values if scale is None else values.mul_(scale)


class _Gradients:
    """Sums dH [N, D], dW [V, D] and dbias [V] over chunks, for the inputs that need a gradient: products 2 and 3.

    The sums are fp32, or fp64 for fp64 inputs. dH is also summed over the ranks of the vocabulary's group. The first
    chunk overwrites dW, so that it need not be zeroed.
    """

    def __init__(self, hidden, weight, bias, needs, vocabulary):
        self.inputs, self.vocabulary = (hidden, weight, bias), vocabulary
        self.dtype = compute_dtype(hidden)
        makers = torch.zeros, torch.empty, torch.zeros
        self.sums = [
            make(value.shape, dtype=self.dtype, device=hidden.device) if needed else None
            for make, value, needed in zip(makers, self.inputs, needs, strict=True)
        ]
        self.first = True

    def add(self, dz, h, rows, columns=None, scale=None):
        """Add the gradients of one chunk from dz [n, V] and h [n, D]; `rows` is its slice or index of the N rows.

        dz and h have the dtype of the products' operands, and dz was divided by `scale`, unless that is None. With
        `columns` [K], dz is [n, K], and the other columns of the vocabulary add nothing.
        """
        dh, dw, dbias = self.sums
        first, self.first = self.first, False
        if dbias is not None:
            dbias[slice(None) if columns is None else columns] += _scaled(dz.sum(0, dtype=self.dtype), scale)
        if columns is not None or scale is not None:
            if first and dw is not None:
                dw.zero_()
            return self._add_blocks(dz, h, rows, columns, scale)
        if dh is not None:
            products = (mm_fp32(dz[:, block], w) for block, w in weight_blocks(self.inputs[1], h.dtype))
            dh[rows] = self.vocabulary.sum_(sum(products))  # dH = dz W
        if dw is not None:
            mm_fp32(dz.T, h, out=dw) if first else add_mm_(dw, dz.T, h)  # dW = dz^T H

    def _add_blocks(self, dz, h, rows, columns, scale):
        """Add the gradients of one chunk in blocks of columns, which stay in a CPU's cache."""
        dh, dw, _ = self.sums
        weight, product = self.inputs[1], torch.zeros(h.shape, dtype=self.dtype, device=h.device)
        for start in range(0, dz.shape[1], GATHERED_ROWS):
            part = slice(start, start + GATHERED_ROWS)
            at = None if columns is None else columns[part]
            if dh is not None:
                block = weight[part] if at is None else weight.index_select(0, at)
                add_mm_(product, dz[:, part], block.to(h.dtype))  # dH = dz W
            if dw is not None:
                block = _scaled(mm_fp32(dz[:, part].T, h), scale)  # dW = dz^T H
                dw[part].add_(block) if at is None else dw.index_add_(0, at, block)  # `columns` has no duplicates
        if dh is not None:
            dh[rows] = self.vocabulary.sum_(_scaled(product, scale))


def _dtypes(*inputs):
    return [None if value is None else value.dtype for value in inputs]


def _rounded(sums, dtypes, scale=1.0):
    """Multiply the sums by `scale` and round them once, to the dtypes of their inputs.

    A gradient rounded to fp16 before it is multiplied by the loss scale may underflow. The sums are not changed,
    because autograd may need them again (retain_graph). A sum that needs neither factor nor rounding is returned
    without a copy, unless reading the factor would be a sync. If this gradient is then changed in place, autograd's
    version check makes a second backward raise.
    """
    same = scale == 1 if isinstance(scale, float) or scale.is_cpu else False
    return [
        total
        if total is None or (same and total.dtype == dtype)
        else torch.mul(total, scale, out=torch.empty_like(total, dtype=dtype))
        for total, dtype in zip(sums, dtypes, strict=True)
    ]


def linear_logprob_fwd(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
    temperature: float | torch.Tensor, size: int, vocabulary: Vocabulary, softcap: float | None,
    return_entropy: bool = False, index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Compute log-probs and entropy by chunks of rows: one product.

    `index` [M] selects rows of hidden; None selects all. Results are fp32, or fp64 for fp64 inputs; entropy is in nats.
    """
    dtype, operands = compute_dtype(hidden), operand_dtype(hidden, weight)
    logps = torch.empty(len(targets), dtype=dtype, device=hidden.device)
    entropy = torch.empty_like(logps) if return_entropy else None
    slices = row_slices(len(targets), size)
    room = _room(slices, weight, dtype)
    for part in slices:
        where = part if index is None else index[part]
        z = _logits(hidden[where].to(operands), weight, bias, cut(temperature, part), softcap, room)[0]
        logps[part], part_entropy = softmax_(z, targets[part], vocabulary, return_entropy)
        if return_entropy:
            entropy[part] = part_entropy
    return logps, entropy


class LinearLogprob(torch.autograd.Function):
    """Log-probs [N] and entropy [N], differentiable by hidden, weight and bias.

    The backward recomputes the logits of each chunk: four products in all.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, size, return_entropy, vocabulary: Vocabulary, softcap,
                sum_hidden_grad, tolerance=0.0):  # fmt: skip
        with no_autocast(hidden):
            logps, entropy = linear_logprob_fwd(
                hidden, weight, bias, targets, temperature, size, vocabulary, softcap, return_entropy
            )
        per_row = isinstance(temperature, torch.Tensor)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, temperature if per_row else None)
        ctx.temperature, ctx.size, ctx.vocabulary = None if per_row else temperature, size, vocabulary
        ctx.softcap, ctx.sum_hidden_grad, ctx.tolerance = softcap, sum_hidden_grad, tolerance
        ctx.set_materialize_grads(False)
        return logps, entropy

    @staticmethod
    @first_order("linear_logprob")
    def backward(ctx, grad_logps, grad_entropy):
        hidden, weight, bias, targets, entropy, temperature = ctx.saved_tensors
        temperature = ctx.temperature if temperature is None else temperature
        summed = ctx.vocabulary if ctx.sum_hidden_grad else ctx.vocabulary._replace(group=None)
        grads = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], summed)
        if grad_logps is None:
            grad_logps = torch.zeros(len(targets), dtype=grads.dtype, device=hidden.device)
        with no_autocast(hidden):
            slices = row_slices(len(targets), ctx.size)
            room = _room(slices, weight, grads.dtype)
            dz = columns = None
            for part in slices:
                h, t = hidden[part].to(operand_dtype(hidden, weight)), cut(temperature, part)
                z, bend = _logits(h, weight, bias, t, ctx.softcap, room)
                softmax_(z, targets[part], ctx.vocabulary)
                if ctx.tolerance:
                    cut_down = bounded_gradient(
                        z, targets[part], ctx.vocabulary, grad_logps[part] / t, ctx.tolerance, bend
                    )
                    dz, columns = cut_down.dz, cut_down.columns
                if dz is None:
                    slope = None if grad_entropy is None else grad_entropy[part] / t
                    part_entropy = cut(entropy, part)
                    dz = logit_gradient_(z, targets[part], ctx.vocabulary, grad_logps[part] / t, part_entropy, slope)
                    if bend is not None:
                        dz *= bend
                dz, scale = _narrowed(dz, h.dtype)
                grads.add(dz, h, part, columns, scale)
                dz = columns = bend = cut_down = None  # free before the next chunk allocates its own
        return *_rounded(grads.sums, _dtypes(hidden, weight, bias)), *(None,) * 8


class LinearGRPO(torch.autograd.Function):
    """Returns the fused loss, a scalar, and a dict of [M] values: log-probs, metrics, and on request the entropy.

    Only the loss is differentiable. `needs` flags which of hidden, weight and bias need a gradient, because
    ctx.needs_input_grad stays True under no_grad. `reference` is given if the objective has the KL of the full
    distributions. If `tolerance` is not 0, the [M] values include `kept_columns` and `dropped_mass`, see `Bounded`.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, objective, size, needs, return_entropy, vocabulary: Vocabulary,
                softcap, reference: ReferenceHead | None, tolerance: float = 0.0):  # fmt: skip
        ctx.set_materialize_grads(False)
        dtype, operands = compute_dtype(hidden), operand_dtype(hidden, weight)
        return_entropy = return_entropy or rows.entropy_weights is not None
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        outputs, dz, columns, scale = [], None, None, None
        with no_autocast(hidden):
            slices = row_slices(len(rows.targets), size)
            parts, known = policy_parts(
                rows, objective, slices, size, policy_loss_fwd,
                lambda: linear_logprob_fwd(hidden, weight, bias, rows.targets, rows.temperature, size, vocabulary,
                                           softcap, index=rows.index)[0],
            )  # fmt: skip
            keep_dz = any(needs) and len(parts) == 1
            grads = _Gradients(hidden, weight, bias, needs, vocabulary) if any(needs) and not keep_dz else None
            room = _room([part for part, _ in parts], weight, dtype)
            ref_room = None if reference is None else torch.empty_like(room)
            for part, sequences in parts:
                where = part if rows.index is None else rows.index[part]
                h, t, targets = hidden[where].to(operands), cut(rows.temperature, part), rows.targets[part]
                z, bend = _logits(h, weight, bias, t, softcap, room)
                logps, entropy = softmax_(z, targets, vocabulary, return_entropy)
                if known is None:
                    part_loss, g, metrics = policy_loss_fwd(logps, rows.cut(part, sequences), objective)
                else:
                    part_loss, g = known[0][part], known[1][part]
                    metrics = {name: values[part] for name, values in known[2].items()}
                bonus = cut(rows.entropy_weights, part)  # - sum_n e_n H_n
                if bonus is not None:
                    part_loss = part_loss - bonus * entropy
                if reference is not None:
                    ref_h = reference.hidden[where].to(operand_dtype(reference.hidden, reference.weight))
                    ref_z = _logits(ref_h, reference.weight, reference.bias, t, softcap, ref_room)[0]
                    kl, log_ratio = full_kl(z, ref_z)
                    kl_weights = objective.beta * rows.weights[part]
                    part_loss, metrics["kl"] = part_loss + kl_weights * kl, kl  # + w beta KL
                loss += part_loss.sum(dtype=torch.float64)
                outputs.append({"logps": logps, **({"entropy": entropy} if return_entropy else {}), **metrics})
                if any(needs):
                    slope = None if bonus is None else -bonus / t
                    dkl = None if reference is None else full_kl_gradient_(z, log_ratio, kl, kl_weights / t)
                    if tolerance:
                        dz, columns, kept, dropped = bounded_gradient(z, targets, vocabulary, g / t, tolerance, bend)
                        outputs[-1] |= {"kept_columns": kept.expand(len(logps)), "dropped_mass": dropped}
                    if dz is None:
                        dz = logit_gradient_(z, targets, vocabulary, g / t, entropy, slope)
                        if dkl is not None:
                            dz += dkl
                        if bend is not None:
                            dz *= bend
                    dz, scale = _narrowed(dz, h.dtype)
                    if not keep_dz:
                        grads.add(dz, h, where, columns, scale)
                        dz = columns = None
                bend = None  # free before the next chunk allocates its own
        if keep_dz:
            ctx.save_for_backward(hidden, weight, bias, rows.index, dz, columns, scale)
        elif grads is not None:
            ctx.save_for_backward(*grads.sums)
        ctx.keep_dz, ctx.needs, ctx.vocabulary = keep_dz, needs, vocabulary
        ctx.dtypes = _dtypes(hidden, weight, bias)
        return loss.to(dtype), {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}

    @staticmethod
    @first_order("linear_grpo_loss")
    def backward(ctx, grad_loss, _):
        if grad_loss is None:
            return (None,) * 12
        sums = ctx.saved_tensors
        if ctx.keep_dz:
            hidden, weight, bias, index, dz, columns, scale = sums
            where = slice(None) if index is None else index
            with no_autocast(hidden):
                products = _Gradients(hidden, weight, bias, ctx.needs, ctx.vocabulary)
                products.add(dz, hidden[where].to(dz.dtype), where, columns, scale)
            sums = products.sums
        return *_rounded(sums, ctx.dtypes, grad_loss), *(None,) * 9


def _chunks(logits, rows, size):
    """Yield each chunk's rows of the logits, slice of the kept rows, and copy of z = logits / T in fp32 or fp64."""
    for part in row_slices(len(rows.targets), size):
        where = part if rows.index is None else rows.index[part]
        t = cut(rows.temperature, part)
        t = t[:, None] if isinstance(t, torch.Tensor) else t
        yield where, part, logits[where].to(compute_dtype(logits), copy=True).div_(t)


class LogitsGRPO(torch.autograd.Function):
    """Returns the loss of logits [N, V], a scalar, and a dict of [M]: log-probs, metrics, and on request the entropy.

    Only the loss is differentiable. With `inplace`, the backward overwrites the logits with their gradient, and
    autograd raises on a second backward.
    """

    @staticmethod
    def forward(ctx, logits, rows, objective, size, return_entropy, inplace):
        ctx.set_materialize_grads(False)
        bonus = rows.entropy_weights
        return_entropy = return_entropy or bonus is not None
        vocabulary = Vocabulary(0, logits.shape[1], logits.shape[1], None)
        logps = torch.empty(len(rows.targets), dtype=compute_dtype(logits), device=logits.device)
        entropy = torch.empty_like(logps) if return_entropy else None
        with no_autocast(logits):
            for _, part, z in _chunks(logits, rows, size):
                logps[part], part_entropy = softmax_(z, rows.targets[part], vocabulary, return_entropy)
                del z  # free before the next chunk allocates its logits
                if return_entropy:
                    entropy[part] = part_entropy
            loss, g, metrics = policy_loss_fwd(logps, rows, objective)
        if bonus is not None:
            loss = loss - bonus * entropy  # - sum_n e_n H_n
        ctx.save_for_backward(logits, g, entropy)
        ctx.rows, ctx.size, ctx.vocabulary, ctx.inplace = rows, size, vocabulary, inplace
        outputs = {"logps": logps, **({"entropy": entropy} if return_entropy else {}), **metrics}
        return loss.sum(dtype=torch.float64).to(loss.dtype), outputs

    @staticmethod
    @first_order("logits_grpo_loss")
    def backward(ctx, grad_loss, _):
        if grad_loss is None:
            return (None,) * 6
        logits, g, entropy = ctx.saved_tensors
        rows = ctx.rows
        grad = logits if ctx.inplace else torch.empty_like(logits)
        with no_autocast(logits):
            for where, part, z in _chunks(logits, rows, ctx.size):
                t, targets = cut(rows.temperature, part), rows.targets[part]
                softmax_(z, targets, ctx.vocabulary)
                # Multiply g by grad_loss first: the scalar grad_loss / t would be fp32 if the temperatures t are fp32.
                slope = None if rows.entropy_weights is None else -rows.entropy_weights[part] * grad_loss / t
                dz = logit_gradient_(z, targets, ctx.vocabulary, g[part] * grad_loss / t, cut(entropy, part), slope)
                grad[where] = dz.to(grad.dtype)
                del z, dz
        if rows.index is not None:
            dropped = torch.ones(len(grad), dtype=torch.bool, device=grad.device).index_fill_(0, rows.index, False)
            grad.masked_fill_(dropped[:, None], 0)
        return grad.detach(), None, None, None, None, None
