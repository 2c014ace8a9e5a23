"""The head's loss and log-probs without Triton: the results of reference.py, in memory bounded by one chunk of rows.

Shapes: N rows (one a token), M <= N kept rows, V vocabulary, D hidden, S sequences. Three matrix products in all:

    z = (H W^T + b) / T,   logp = z_t - logsumexp(z),   g = dloss/dlogp,
    dz = g (onehot_t - softmax(z)) / T,   dH = dz W,   dW = dz^T H

A GRPO gradient is separable by row: g is known as soon as logp is, so dz is formed in place of the logits, in the
forward. Where one chunk holds all rows, the forward keeps dz and the backward runs the last two products, so that
nothing is wasted inside a checkpointed region. With several chunks the forward runs them chunk by chunk and keeps dH
and dW. The KL of the full distributions (full_kl.py) takes one product more, of the reference's states with its head,
and adds its own part to dz. With a tolerance, the last two products run over fewer columns (bounded.py). A weight whose
rows are sharded over processes (vocabulary-parallel) adds all-reduces of per-row values (softmax.py) and of dH; dW and
dbias stay with their shard.
"""

import torch

from fastgrpo.kernels.bounded import bounded_gradient
from fastgrpo.kernels.first_order import first_order
from fastgrpo.kernels.full_kl import ReferenceHead, full_kl, full_kl_gradient_
from fastgrpo.kernels.objectives import policy_loss_fwd
from fastgrpo.kernels.policy_rows import cut, policy_parts
from fastgrpo.kernels.products import compute_dtype, no_autocast, weight_blocks
from fastgrpo.kernels.softmax import Vocabulary, logit_gradient_, softmax_

CHUNK_BYTES = 64 * 2**20  # bytes of one chunk's fp32 logits: enough for full-speed products, little beside a model
MIN_CHUNK_ROWS = 128
GATHERED_ROWS = 2048  # rows of a weight gathered at a time, where not all of them are multiplied


def chunk_rows(vocab_size: int) -> int:
    """Choose how many rows a chunk has.

    Returns:
        Rows whose fp32 logits fill CHUNK_BYTES, and at least MIN_CHUNK_ROWS.
    """
    return max(MIN_CHUNK_ROWS, CHUNK_BYTES // (4 * vocab_size))


def row_slices(total: int, size: int) -> list[slice]:
    """Cut rows into chunks."""
    return [slice(start, min(start + size, total)) for start in range(0, max(total, 1), size)]


def _room(slices, weight, dtype):
    """Make room for the logits of any of the chunks.

    They all use it, because fresh memory costs the system's time, on a CPU a tenth of the product that fills it.
    """
    return torch.empty(max(part.stop - part.start for part in slices), len(weight), dtype=dtype, device=weight.device)


def _logits(hidden, weight, bias, temperature, softcap, room):
    """Compute z [n, V] in the dtype of hidden (fp32 or fp64), and the slope dy/dx [n, V] of the soft-cap, or None.

    z lies at the beginning of `room`.
    """
    z = room[: len(hidden)]
    for block, w in weight_blocks(weight, hidden.dtype):
        torch.mm(hidden, w.T, out=z[:, block])  # z = h W^T, product 1
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


class _Gradients:
    """Sums dH [N, D], dW [V, D] and dbias [V] over chunks, for the inputs that want a gradient: products 2 and 3.

    The sums are fp32, or fp64 for fp64 inputs. dH is summed over the ranks of the vocabulary's group too. The first
    chunk overwrites dW, which need not be zeroed before.
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

    def add(self, dz, h, rows, columns=None):
        """Add the gradients of one chunk from dz [n, V] and h [n, D]; `rows` is its slice or index among the N rows.

        With `columns` [K], dz is [n, K] and the other columns of the vocabulary add nothing.
        """
        dh, dw, dbias = self.sums
        first, self.first = self.first, False
        if columns is not None:
            if first and dw is not None:
                dw.zero_()
            return self._add_columns(dz, h, rows, columns)
        if dh is not None:
            products = (dz[:, block] @ w for block, w in weight_blocks(self.inputs[1], self.dtype))
            dh[rows] = self.vocabulary.sum_(sum(products))  # dH = dz W
        if dw is not None:
            dw.addmm_(dz.T, h, beta=0 if first else 1)  # dW = dz^T H
        if dbias is not None:
            dbias += dz.sum(0)

    def _add_columns(self, dz, h, rows, columns):
        """Add the gradients of one chunk over some columns, a block at a time, which stays in the cache."""
        dh, dw, dbias = self.sums
        product = torch.zeros_like(h)
        for start in range(0, len(columns), GATHERED_ROWS):
            part = slice(start, start + GATHERED_ROWS)
            at = columns[part]
            if dh is not None:
                product.addmm_(dz[:, part], self.inputs[1].index_select(0, at).to(self.dtype))  # dH = dz W
            if dw is not None:
                dw.index_add_(0, at, dz[:, part].T @ h)  # dW = dz^T H; a column stands in `columns` once
        if dh is not None:
            dh[rows] = self.vocabulary.sum_(product)
        if dbias is not None:
            dbias[columns] += dz.sum(0)


def _dtypes(*inputs):
    return [None if value is None else value.dtype for value in inputs]


def _rounded(sums, dtypes, scale=1.0):
    """Multiply the sums by `scale` and round them once, to the dtypes of their inputs.

    A gradient that is rounded to fp16 before the loss scale multiplies it may have vanished. The sums themselves stay
    as they are, because autograd may ask for them again (retain_graph). What needs neither a factor nor rounding is
    returned without a copy, unless a look at the factor would make the host wait for a GPU. Autograd's count of the
    writes to what it has saved then makes a second backward an error, if somebody has written to the gradient.
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

    Args:
        hidden: [N, D].
        weight: [V, D].
        bias: [V] or None.
        targets: [M] int64 token ids.
        temperature: A float, or [M].
        size: Most rows of a chunk.
        vocabulary: Which part of the vocabulary `weight` holds.
        softcap: The cap of the logits, or None.
        return_entropy: Whether to compute the entropy too.
        index: [M] int64 rows of hidden, or None for all of them.

    Returns:
        logps [M], and entropy [M] in nats or None. fp32, or fp64 for fp64 inputs.
    """
    dtype = compute_dtype(hidden)
    logps = torch.empty(len(targets), dtype=dtype, device=hidden.device)
    entropy = torch.empty_like(logps) if return_entropy else None
    slices = row_slices(len(targets), size)
    room = _room(slices, weight, dtype)
    for part in slices:
        where = part if index is None else index[part]
        z = _logits(hidden[where].to(dtype), weight, bias, cut(temperature, part), softcap, room)[0]
        logps[part], part_entropy = softmax_(z, targets[part], vocabulary, return_entropy)
        if return_entropy:
            entropy[part] = part_entropy
    return logps, entropy


class LinearLogprob(torch.autograd.Function):
    """Log-probs [N] and entropy [N], differentiable by hidden, weight and bias.

    The backward computes the logits of each chunk again: four products in all.
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
                h, t = hidden[part].to(grads.dtype), cut(temperature, part)
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
                grads.add(dz, h, part, columns)
                dz = columns = bend = cut_down = None  # freed before the next chunk's are allocated
        return *_rounded(grads.sums, _dtypes(hidden, weight, bias)), *(None,) * 8


class LinearGRPO(torch.autograd.Function):
    """Returns the fused loss, a scalar, and a dict of [M] values: log-probs, metrics, and on request the entropy.

    Only the loss is differentiable. `needs` says which of hidden, weight and bias need a gradient, because
    ctx.needs_input_grad stays True under no_grad. `reference` is there where the objective has the KL of the full
    distributions. Where `tolerance` is not 0, the [M] values have `kept_columns`, the share of its chunk, and
    `dropped_mass`, see bounded.py.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, objective, size, needs, return_entropy, vocabulary: Vocabulary,
                softcap, reference: ReferenceHead | None, tolerance: float = 0.0):  # fmt: skip
        ctx.set_materialize_grads(False)
        dtype = compute_dtype(hidden)
        return_entropy = return_entropy or rows.entropy_weights is not None
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        outputs, dz, columns = [], None, None
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
                h, t, targets = hidden[where].to(dtype), cut(rows.temperature, part), rows.targets[part]
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
                    ref_h = reference.hidden[where].to(dtype)
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
                    if not keep_dz:
                        grads.add(dz, h, where, columns)
                        dz = columns = None
                bend = None  # freed before the next chunk's is allocated
        if keep_dz:
            ctx.save_for_backward(hidden, weight, bias, rows.index, dz, columns)
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
            hidden, weight, bias, index, dz, columns = sums
            where = slice(None) if index is None else index
            with no_autocast(hidden):
                products = _Gradients(hidden, weight, bias, ctx.needs, ctx.vocabulary)
                products.add(dz, hidden[where].to(dz.dtype), where, columns)
            sums = products.sums
        return *_rounded(sums, ctx.dtypes, grad_loss), *(None,) * 9
