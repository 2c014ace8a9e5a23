"""Log-prob and entropy of hidden @ weight.T with no logits in memory, and their gradients, in Triton.

    z = y / T,  y = softcap(h . w + b),   logp = z_t - log sum_v exp(z_v),   H = -sum_v p_v log p_v
    dz_v = g (1[v = t] - p_v) - h p_v (log p_v + H)       for gradients g of logp and h of H

Two paths, by dtype (tests may choose):

- "anchored" (bf16). E_v = exp(z_v - c) with the target's own z as the anchor c, stored in bf16, which has the exponent
  range for it; S = sum over v != t of E_v in fp32. Then logp = -log1p(S), p_v = E_v / (S + 1), and with the target's
  entry of E overwritten by -S, dz_v = v E_v for v = -g / (S + 1): the forward's product has become the backward's
  operand. A row whose S reaches 2^86 (its target 60 nats down) gets its maximum as anchor, in two guarded passes.
- "recompute" (fp16, whose range ends 11 nats above the anchor, and fp32). An online softmax forward; the backward forms
  p_v from the log-sum-exp, chunk by chunk: four products. An anchored forward of more rows than a chunk, or with an
  entropy gradient under a soft-cap, takes this backward too.

A weight whose rows are sharded over processes (`group`, the name of the process group) takes the same way: c, the sums
and the maxima of flagged rows are all-reduced [N], so that every rank decides alike; only the rank that has the target
patches E; dH is summed over the ranks. Targets are then ids within the shard, or ELSEWHERE (softmax.py).

Shapes: N rows, V vocabulary, D hidden. The operators are opaque to torch.compile: it would take their products apart.
"""

import torch

from fastgrpo.kernels import launch
from fastgrpo.kernels.head_gradients import HeadGradients, grad_dtype, head_products, wanted
from fastgrpo.kernels.head_rows import Rows, entropy_bwd, finish_fwd, reduce_fwd
from fastgrpo.kernels.linear_exp import anchor_fwd, linear_exp_fwd
from fastgrpo.kernels.online import online_fwd
from fastgrpo.kernels.products import needed, no_autocast
from fastgrpo.kernels.softmax import ELSEWHERE, all_reduce_
from fastgrpo.kernels.tiles import LN2, Head

Tensor = torch.Tensor
PATHS = {torch.bfloat16: "anchored", torch.float16: "recompute", torch.float32: "recompute"}


def chunk_slices(total, size):
    """Equal chunks of at most `size` rows, rounded to 128 rows; one of no rows where there are none."""
    count = max(1, -(-total // size))
    step = min(size, -(-total // count // 128) * 128) if count > 1 else max(total, 1)
    return [slice(start, min(start + step, total)) for start in range(0, max(total, 1), step)]


def empty_exps(rows, vocab, like):
    """[rows, vocab] in the dtype of `like`, its pitch a multiple of 64 elements: bulk copies want 16 bytes."""
    return torch.empty_strided((rows, vocab), (-(-vocab // 64) * 64, 1), dtype=like.dtype, device=like.device)


def rows_fwd(head, anchored, exps=None, entropy=False, group=None):
    """head (checked, N > 0) -> [7, N], see `Rows`. Anchored, `exps` [N, V] is filled where it is given."""
    target_y = anchor_fwd(head)
    if group is not None:  # from the rank that has the target; NaN, of a target that no rank has, from all
        target_y = all_reduce_(torch.where(head.targets == ELSEWHERE, 0.0, target_y), group)
    total = entropy_sum = None
    if anchored:
        sums = linear_exp_fwd(head, target_y, exps, entropy=entropy)
        total, entropy_sum = (None if tiles is None else all_reduce_(reduce_fwd(tiles), group) for tiles in sums)
    # Both guarded passes are always launched, so that nothing waits for the answer; a program without a flag returns.
    splits = online_fwd(head, entropy, flags=total)
    if group is not None:
        splits = merge_ranks(splits, group)
    rows = finish_fwd(head, target_y, total, entropy_sum, splits, exps, entropy)
    if anchored and exps is not None:
        stats = Rows(*rows.unbind(0))
        linear_exp_fwd(head, stats.anchor, exps, patch=stats.patch, sums=False, flags=total)
    return rows


def merge_ranks(splits, group):
    """The online softmax of the splits [splits, N] of every rank as one split [1, N], equal on all ranks."""
    tops, totals, entropies = splits
    top = all_reduce_(tops.amax(0, keepdim=True), group, torch.distributed.ReduceOp.MAX)
    moved = torch.where(totals > 0, tops - top, 0.0)  # -inf - -inf is NaN: a split of the target alone
    shrink = moved.exp2()
    total = all_reduce_((totals * shrink).sum(0, keepdim=True), group)
    if entropies is None:
        return top, total, None
    entropies = (entropies + totals * moved) * shrink
    return top, total, all_reduce_(entropies.sum(0, keepdim=True), group)


def recompute_exps(head, rows, g, h, exps):
    """Fill `exps` [N, V] from the log-sum-exp and return v [N], so that dz = v exps: the fourth product.

    The larger of |g| and |h| goes into v: fp16 holds probabilities, not probabilities times a token's weight.
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
                       chunk_rows: int, group: str | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> (`Rows` as [7, N] fp32, E [N, V] where `keep`, else [0, V]). Without `keep` by chunks: one product."""
    n, vocab = len(hidden), weight.shape[0]
    with no_autocast(hidden):
        head = Head(hidden, weight, bias, targets, temperature, temperatures, softcap).checked()
        exps = empty_exps(n if keep else 0, vocab, weight)
        if n == 0:
            return hidden.new_zeros(7, 0, dtype=torch.float32), exps
        if keep:
            return rows_fwd(head, anchored, exps, entropy, group), exps
        parts = [rows_fwd(head.cut(part), anchored, None, entropy, group) for part in chunk_slices(n, chunk_rows)]
        return (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]), exps


@linear_logprob_fwd.register_fake
def _(hidden, weight, bias, targets, temperature, temperatures, softcap, anchored, keep, entropy, chunk_rows, group):
    n, vocab = len(hidden), weight.shape[0]
    return hidden.new_empty(7, n, dtype=torch.float32), empty_exps(n if keep else 0, vocab, weight)


@launch.operator("fastgrpo::head_entropy_bwd")
def head_entropy_bwd(exps: Tensor, targets: Tensor, rows: Tensor, g: Tensor, h: Tensor) -> Tensor:
    """E with the gradients g of logp and h of the entropy in it, as a new tensor; v is then the slope alone."""
    return entropy_bwd(exps, targets, Rows(*rows.unbind(0)), g, h, empty_exps(*exps.shape, exps))


@head_entropy_bwd.register_fake
def _(exps, targets, rows, g, h):
    return empty_exps(*exps.shape, exps)


@launch.operator("fastgrpo::head_entropy_bwd_", mutates_args=("exps",))
def head_entropy_bwd_(exps: Tensor, targets: Tensor, rows: Tensor, g: Tensor, h: Tensor) -> None:
    """The same in place."""
    entropy_bwd(exps, targets, Rows(*rows.unbind(0)), g, h, exps)


@launch.operator("fastgrpo::linear_logprob_bwd")
def linear_logprob_bwd(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
                       temperatures: Tensor | None, softcap: float | None, rows: Tensor, g: Tensor,
                       h: Tensor | None, needs: list[bool], weight_dtype: torch.dtype, chunk_rows: int,
                       group: str | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The recomputing backward, by chunks; results as head_products."""
    grads = HeadGradients(len(hidden), weight, needs, group)
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
      group):  # fmt: skip
    return (
        hidden.new_empty(hidden.shape if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0, dtype=weight_dtype),
        rows.new_empty(weight.shape[0] if needs[2] else 0),
    )


class LinearLogprob(torch.autograd.Function):
    """logps [N] and entropy [N], fp32, with gradients of hidden, weight and bias.

    needs: which of the three want a gradient; ctx.needs_input_grad stays True under no_grad.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, temperatures, softcap, needs, return_entropy, anchored,
                chunk_rows, group):  # fmt: skip
        ctx.set_materialize_grads(False)
        # A soft-cap's slope is in E, and log p cannot be read back from it.
        keep = any(needs) and anchored and len(hidden) <= chunk_rows and not (return_entropy and softcap is not None)
        rows, exps = linear_logprob_fwd(hidden, weight, bias, targets, temperature, temperatures, softcap, anchored,
                                        keep, return_entropy, chunk_rows, group)  # fmt: skip
        if any(needs):
            ctx.save_for_backward(hidden, weight, bias, targets, temperatures, rows, exps)
        ctx.options = (temperature, softcap, needs, chunk_rows, group, keep)
        return rows[0].clone(), rows[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logps, grad_entropy):
        hidden, weight, bias, targets, temperatures, rows, exps = ctx.saved_tensors
        temperature, softcap, needs, chunk_rows, group, keep = ctx.options
        g = torch.zeros_like(rows[0]) if grad_logps is None else grad_logps.contiguous()
        h = None if grad_entropy is None else grad_entropy.contiguous()
        if keep:
            if h is not None:
                exps, g = head_entropy_bwd(exps, targets, rows, g, h), 1.0
            gradients = head_products(exps, g * rows[3], hidden, weight, list(needs), grad_dtype(weight), group)
        else:
            gradients = linear_logprob_bwd(hidden, weight, bias, targets, temperature, temperatures, softcap, rows, g,
                                           h, list(needs), grad_dtype(weight), chunk_rows, group)  # fmt: skip
        return *wanted(gradients, needs, needs[2] and grad_dtype(bias)), *(None,) * 9


def linear_logprob(hidden, weight, targets, *, bias=None, temperature=1.0, softcap=None, return_entropy=False,
                   group=None, path=None, chunk_rows=launch.CHUNK_ROWS):  # fmt: skip
    """(logps [N], entropy [N] or None), differentiable. hidden [N, D], weight [V, D] of one dtype, targets [N].

    group: name of the process group of a sharded weight, targets as `Vocabulary.located` gives them; None is whole.
    path: "anchored" or "recompute"; None is by dtype.
    """
    needs = needed(hidden, weight, bias)
    per_row = isinstance(temperature, torch.Tensor)
    logps, entropy = LinearLogprob.apply(
        hidden, weight, bias, targets, 1.0 if per_row else float(temperature), temperature if per_row else None,
        softcap, needs, return_entropy, (path or PATHS[hidden.dtype]) == "anchored", chunk_rows, group,
    )  # fmt: skip
    return logps, entropy if return_entropy else None
