"""Log-prob and entropy of hidden @ weight.T with no logits in memory, and their gradients, in Triton.

    z = y / T,  y = softcap(h . w + b),   logp = z_t - log sum_v exp(z_v),   H = -sum_v p_v log p_v
    dz_v = g (1[v = t] - p_v) - h p_v (log p_v + H)       for gradients g of logp and h of H

There are two paths. The dtype decides which one runs, unless the caller names one, as tests do.

- "anchored" (bf16). E_v = exp(z_v - c), with the target's own z as the anchor c, is stored in bf16, which has the
  exponent range for it; S, the sum of E_v over v != t, is fp32. Then logp = -log1p(S) and p_v = E_v / (S + 1). With the
  target's entry of E overwritten by -S, dz_v = v E_v for v = -g / (S + 1): the forward's product has become the
  backward's operand. A row whose S reaches 2^86 (its target lies 60 nats below) gets its maximum as the anchor instead,
  in two guarded passes.
- "recompute" (fp16, whose range ends 11 nats above the anchor, and fp32). The forward is an online softmax. The
  backward forms p_v from the log-sum-exp, chunk by chunk: four products in all. An anchored forward of more rows than a
  chunk, or with an entropy gradient under a soft-cap, takes this backward too.

A weight may be sharded by rows over processes (`group` is the name of their process group). Then c, the sums and the
maxima of flagged rows [N] are all-reduced, so that every rank decides alike; only the rank that has a target patches
its E; dH is summed over the ranks. Targets are then ids within the shard, or ELSEWHERE (softmax.py).

The operators are opaque to torch.compile, which would take their products apart.

Shapes: N rows of hidden states (tokens), V vocabulary, D hidden size.
"""

import torch

from fastgrpo.kernels import launch
from fastgrpo.kernels.first_order import first_order
from fastgrpo.kernels.head_columns import head_columns_, head_products_within, head_shares
from fastgrpo.kernels.head_gradients import HeadGradients, grad_dtype, head_products, wanted
from fastgrpo.kernels.head_rows import Rows, entropy_bwd, finish_fwd, reduce_fwd
from fastgrpo.kernels.linear_exp import anchor_fwd, empty_exps, linear_exp_fwd
from fastgrpo.kernels.online import online_fwd
from fastgrpo.kernels.policy_rows import cut
from fastgrpo.kernels.products import needed, no_autocast
from fastgrpo.kernels.softmax import ELSEWHERE, all_reduce_
from fastgrpo.kernels.tiles import LN2, Head

Tensor = torch.Tensor
PATHS = {torch.bfloat16: "anchored", torch.float16: "recompute", torch.float32: "recompute"}


def chunk_slices(total: int, size: int) -> list[slice]:
    """Cut rows into equal chunks, rounded to 128 rows."""
    count = max(1, -(-total // size))
    step = min(size, -(-total // count // 128) * 128) if count > 1 else max(total, 1)
    return [slice(start, min(start + step, total)) for start in range(0, max(total, 1), step)]


def rows_fwd(
    head: Head, anchored: bool, exps: Tensor | None = None, entropy: bool = False, group: str | None = None,
    bend: bool = True,
) -> Tensor:  # fmt: skip
    """Compute what the loss and the backward need for each row, and fill E.

    Args:
        head: The checked arguments of the head, N > 0.
        anchored: Whether the path is the anchored one.
        exps: [N, V], which the anchored path fills with E, or None.
        entropy: Whether the entropy is computed.
        group: Name of the process group of a sharded weight, or None.
        bend: Whether E carries the slope of the soft-cap.

    Returns:
        [7, N] fp32, see `head_rows.Rows`.
    """
    target_y = anchor_fwd(head)
    if group is not None:  # c comes from the rank that has the target; for a target that no rank has, all give NaN
        target_y = all_reduce_(torch.where(head.targets == ELSEWHERE, 0.0, target_y), group)
    total = entropy_sum = None
    if anchored:
        sums = linear_exp_fwd(head, target_y, exps, entropy=entropy, bend=bend)
        total, entropy_sum = (None if tiles is None else all_reduce_(reduce_fwd(tiles), group) for tiles in sums)
    # Both guarded passes are always launched, so that nothing waits for the flags; a program without a flag returns.
    splits = online_fwd(head, entropy, flags=total)
    if group is not None:
        splits = merge_ranks(splits, group)
    rows = finish_fwd(head, target_y, total, entropy_sum, splits, exps, entropy)
    if anchored and exps is not None:
        stats = Rows(*rows.unbind(0))
        linear_exp_fwd(head, stats.anchor, exps, patch=stats.patch, sums=False, flags=total, bend=bend)
    return rows


def merge_ranks(splits: tuple[Tensor, Tensor, Tensor | None], group: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Merge the online softmax over the splits of every rank into one split, equal on all ranks.

    Args:
        splits: Maxima, sums and entropy sums (or None), [splits, N] each, as `online_fwd` returns them.
        group: Name of the process group.

    Returns:
        The same, [1, N] each.
    """
    tops, totals, entropies = splits
    top = all_reduce_(tops.amax(0, keepdim=True), group, torch.distributed.ReduceOp.MAX)
    moved = torch.where(totals > 0, tops - top, 0.0)  # -inf - -inf would be NaN, where a split holds the target alone
    shrink = moved.exp2()
    total = all_reduce_((totals * shrink).sum(0, keepdim=True), group)
    if entropies is None:
        return top, total, None
    entropies = (entropies + totals * moved) * shrink
    return top, total, all_reduce_(entropies.sum(0, keepdim=True), group)


def recompute_exps(head: Head, rows: Rows, g: Tensor, h: Tensor | None, exps: Tensor) -> Tensor:
    """Fill `exps` from the log-sum-exp, so that dz = v exps: the fourth product.

    The larger of |g| and |h| goes into v, since fp16 holds probabilities, but not probabilities times the weight of a
    token.

    Args:
        head: The checked arguments of the head.
        rows: What the forward computed.
        g: [N] fp32, gradient of the log-probs.
        h: [N] fp32, gradient of the entropies, or None.
        exps: [N, V], which is filled.

    Returns:
        v [N] fp32.
    """
    rows = rows.normalized()
    if h is None:
        linear_exp_fwd(head, rows.anchor, exps, patch=rows.patch, sums=False)
        return g * rows.slope
    size = torch.maximum(g.abs(), h.abs()).clamp_(min=1e-30)
    g, h = g / size, h / size
    mix = torch.stack([g + h * rows.entropy, h * LN2.value])
    patch = g * rows.patch + h * rows.mass * (rows.logp + rows.entropy)
    linear_exp_fwd(head, rows.anchor, exps, patch=patch, mix=mix, sums=False)
    return size * rows.slope


@launch.operator("fastgrpo::linear_logprob_fwd")
def linear_logprob_fwd(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
                       temperatures: Tensor | None, softcap: float | None, anchored: bool, keep: bool, entropy: bool,
                       chunk_rows: int, group: str | None,
                       bend: bool = True) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute log-probs, entropy and what the backward needs; without `keep` by chunks, at the cost of one product.

    Args:
        hidden: [N, D] bf16, fp16 or fp32.
        weight: [V, D] in the dtype of hidden.
        bias: [V] or None.
        targets: [N] int64.
        temperature: T of all rows, read where `temperatures` is None.
        temperatures: [N] T of each row, or None.
        softcap: Cap of the logits, or None.
        anchored: Whether the path is the anchored one.
        keep: Whether E is kept for the backward.
        entropy: Whether the entropy is computed.
        chunk_rows: The most rows of a chunk.
        group: Name of the process group of a sharded weight, or None.
        bend: Whether a kept E carries the slope of the soft-cap.

    Returns:
        `head_rows.Rows` as [7, N] fp32; and E, [N, V] where it is kept, else [0, V].
    """
    n, vocab = len(hidden), weight.shape[0]
    with no_autocast(hidden):
        head = Head(hidden, weight, bias, targets, temperature, temperatures, softcap).checked()
        exps = empty_exps(n if keep else 0, vocab, weight)
        if n == 0:
            return hidden.new_zeros(7, 0, dtype=torch.float32), exps
        if keep:
            return rows_fwd(head, anchored, exps, entropy, group, bend), exps
        parts = [rows_fwd(head.cut(part), anchored, None, entropy, group) for part in chunk_slices(n, chunk_rows)]
        return (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]), exps


@linear_logprob_fwd.register_fake
def _(hidden, weight, bias, targets, temperature, temperatures, softcap, anchored, keep, entropy, chunk_rows, group,
      bend=True):  # fmt: skip
    n, vocab = len(hidden), weight.shape[0]
    return hidden.new_empty(7, n, dtype=torch.float32), empty_exps(n if keep else 0, vocab, weight)


@launch.operator("fastgrpo::head_entropy_bwd")
def head_entropy_bwd(exps: Tensor, targets: Tensor, rows: Tensor, g: Tensor, h: Tensor) -> Tensor:
    """Bring the gradients of log-prob and entropy into E; v is then the slope of `rows` alone.

    Args:
        exps: [N, V] anchored E.
        targets: [N] int64.
        rows: [7, N] fp32, `head_rows.Rows` of the forward.
        g: [N] fp32, gradient of the log-probs.
        h: [N] fp32, gradient of the entropies.

    Returns:
        [N, V], a new tensor.
    """
    return entropy_bwd(exps, targets, Rows(*rows.unbind(0)), g, h, empty_exps(*exps.shape, exps))


@head_entropy_bwd.register_fake
def _(exps, targets, rows, g, h):
    return empty_exps(*exps.shape, exps)


@launch.operator("fastgrpo::head_entropy_bwd_", mutates_args=("exps",))
def head_entropy_bwd_(exps: Tensor, targets: Tensor, rows: Tensor, g: Tensor, h: Tensor) -> None:
    """Bring the gradients of log-prob and entropy into E in place; v is then the slope of `rows` alone.

    Args:
        exps: [N, V] anchored E.
        targets: [N] int64.
        rows: [7, N] fp32, `head_rows.Rows` of the forward.
        g: [N] fp32, gradient of the log-probs.
        h: [N] fp32, gradient of the entropies.
    """
    entropy_bwd(exps, targets, Rows(*rows.unbind(0)), g, h, exps)


@launch.operator("fastgrpo::linear_logprob_bwd")
def linear_logprob_bwd(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
                       temperatures: Tensor | None, softcap: float | None, rows: Tensor, g: Tensor,
                       h: Tensor | None, needs: list[bool], weight_dtype: torch.dtype, chunk_rows: int,
                       group: str | None, tolerance: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Recompute E by chunks and compute the gradients from it.

    Args:
        hidden: [N, D] bf16, fp16 or fp32.
        weight: [V, D] in the dtype of hidden.
        bias: [V] or None.
        targets: [N] int64.
        temperature: T of all rows, read where `temperatures` is None.
        temperatures: [N] T of each row, or None.
        softcap: Cap of the logits, or None.
        rows: [7, N] fp32, `head_rows.Rows` of the forward.
        g: [N] fp32, gradient of the log-probs.
        h: [N] fp32, gradient of the entropies, or None.
        needs: Which of the gradients of hidden, weight and bias are needed.
        weight_dtype: Dtype of dW.
        chunk_rows: The most rows of a chunk.
        group: Name of the process group of a sharded weight, or None.
        tolerance: Which share of a row's gradient may be left out (head_columns.py); 0 where `h` is given.

    Returns:
        dH [N, D], dW [V, D] and dbias [V], as `head_products` returns them.
    """
    grads = HeadGradients(len(hidden), weight, needs, group)
    if tolerance:
        for part in chunk_slices(len(hidden), chunk_rows) if len(hidden) else ():
            states, located, ts = hidden[part], targets[part], cut(temperatures, part)
            exps, stats = head_shares(states, weight, bias, located, temperature, ts, softcap, rows[:, part])
            columns, count, *_ = head_columns_(exps, located, stats, g[part], temperature, ts, softcap, tolerance, None)
            grads.add(exps, g[part] * stats[3], states, columns, count)
        return grads.result(weight_dtype)
    with no_autocast(hidden):
        head = Head(hidden, weight, bias, targets, temperature, temperatures, softcap).checked()
        for part in chunk_slices(len(hidden), chunk_rows) if len(hidden) else ():
            exps = empty_exps(part.stop - part.start, weight.shape[0], weight)
            stats = Rows(*rows[:, part].unbind(0))
            v = recompute_exps(head.cut(part), stats, g[part], None if h is None else h[part], exps)
            grads.add(exps, v, hidden[part])
    return grads.result(weight_dtype)


@linear_logprob_bwd.register_fake
def _(hidden, weight, bias, targets, temperature, temperatures, softcap, rows, g, h, needs, weight_dtype, chunk_rows,
      group, tolerance=0.0):  # fmt: skip
    return (
        hidden.new_empty(hidden.shape if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0, dtype=weight_dtype),
        rows.new_empty(weight.shape[0] if needs[2] else 0),
    )


class LinearLogprob(torch.autograd.Function):
    """Log-probs [N] and entropy [N], fp32, with gradients of hidden, weight and bias.

    `needs` says which of the three need a gradient, because ctx.needs_input_grad stays True under no_grad.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, temperatures, softcap, needs, return_entropy, anchored,
                chunk_rows, group, sum_hidden_grad, tolerance):  # fmt: skip
        ctx.set_materialize_grads(False)
        # Under a soft-cap its slope is in E, and an entropy gradient could not read log p back from that.
        keep = any(needs) and anchored and len(hidden) <= chunk_rows and not (return_entropy and softcap is not None)
        rows, exps = linear_logprob_fwd(hidden, weight, bias, targets, temperature, temperatures, softcap, anchored,
                                        keep, return_entropy, chunk_rows, group, not tolerance)  # fmt: skip
        if any(needs):
            ctx.save_for_backward(hidden, weight, bias, targets, temperatures, rows, exps)
        ctx.options = (temperature, softcap, needs, chunk_rows, group if sum_hidden_grad else None, keep, tolerance)
        return rows[0].clone(), rows[1].clone()

    @staticmethod
    @first_order("linear_logprob")
    def backward(ctx, grad_logps, grad_entropy):
        hidden, weight, bias, targets, temperatures, rows, exps = ctx.saved_tensors
        temperature, softcap, needs, chunk_rows, group, keep, tolerance = ctx.options
        g = torch.zeros_like(rows[0]) if grad_logps is None else grad_logps.contiguous()
        h = None if grad_entropy is None else grad_entropy.contiguous()
        if keep and tolerance:
            gradients = head_products_within(exps, targets, rows, g, hidden, weight, temperature, temperatures, softcap,
                                             tolerance, list(needs), grad_dtype(weight), group)  # fmt: skip
        elif keep:
            if h is not None:
                exps, g = head_entropy_bwd(exps, targets, rows, g, h), 1.0
            gradients = head_products(exps, g * rows[3], hidden, weight, list(needs), grad_dtype(weight), group)
        else:
            gradients = linear_logprob_bwd(hidden, weight, bias, targets, temperature, temperatures, softcap, rows, g,
                                           h, list(needs), grad_dtype(weight), chunk_rows, group,
                                           tolerance)  # fmt: skip
        return *wanted(gradients, needs, needs[2] and grad_dtype(bias)), *(None,) * 11


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    group: str | None = None,
    sum_hidden_grad: bool = True,
    path: str | None = None,
    chunk_rows: int = launch.CHUNK_ROWS,
    tolerance: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs of targets under softmax(softcap(hidden @ weight.T + bias) / temperature), differentiably.

    Args:
        hidden: [N, D] bf16, fp16 or fp32.
        weight: [V, D] in the dtype of hidden.
        targets: [N] int64 in [0, V), or as `Vocabulary.located` gives them where the weight is sharded. A bad target
            gives NaN in its row.
        bias: [V] or None.
        temperature: A float, or [N].
        softcap: Cap of the logits, or None.
        return_entropy: Whether the entropy is computed.
        group: Name of the process group of a sharded weight, or None.
        sum_hidden_grad: Whether the gradient of hidden is summed over the group. Otherwise each rank gets its shard's
            part.
        path: "anchored" or "recompute". None chooses by the dtype of hidden.
        chunk_rows: The most rows of hidden whose exponentials are held at once.
        tolerance: Which share of a row's gradient may be left out (head_columns.py); 0 with `return_entropy`.

    Returns:
        logps [N] fp32, and the entropy [N] fp32 in nats, or None.
    """
    needs = needed(hidden, weight, bias)
    per_row = isinstance(temperature, torch.Tensor)
    logps, entropy = LinearLogprob.apply(
        hidden, weight, bias, targets, 1.0 if per_row else float(temperature), temperature if per_row else None,
        softcap, needs, return_entropy, (path or PATHS[hidden.dtype]) == "anchored", chunk_rows, group,
        sum_hidden_grad, tolerance,
    )  # fmt: skip
    return logps, entropy if return_entropy else None
