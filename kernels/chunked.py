"""The path that runs without Triton: chunks of rows, the results of reference.py, memory bounded by one chunk.

Shapes: N rows, M <= N kept rows, V vocabulary, D hidden, S sequences. Three matrix products in all:

    z = (H W^T + b) / T,   logp = z_t - logsumexp(z),   g = dloss/dlogp,
    dz = g (onehot_t - softmax(z)) / T,   dH = dz W,   dW = dz^T H

A GRPO gradient is separable by row: g is known as soon as logp is, so dz is formed in place of the logits, in the
forward. One chunk alone keeps dz and runs the last two products in the backward (nothing is wasted inside a
checkpointed region); several chunks run them at once and keep dH and dW.
"""

from typing import NamedTuple

import torch

CHUNK_BYTES = 64 * 2**20  # of one chunk's logits: large enough for full-speed products, small beside a model
MIN_CHUNK_ROWS = 128
CAST_ROWS = 8192  # rows of a bf16 or fp16 weight cast to fp32 at a time


class PolicyRows(NamedTuple):
    """What the loss needs to know of the M kept rows; nothing in it carries gradient.

    index: [M] int64, increasing, the kept rows among the N rows of hidden, or None where all are kept.
    targets: [M] int64. temperature: float or [M]. advantages, weights: [M] fp32. old_logps, ref_logps: [M] or None.
    lengths: [S] int64, kept rows of each sequence, or None where the objective never looks at sequences.
    """

    index: torch.Tensor | None
    targets: torch.Tensor
    temperature: float | torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor | None
    lengths: torch.Tensor | None


def chunk_rows(vocab_size):
    """Rows of a chunk for a vocabulary of this size."""
    return max(MIN_CHUNK_ROWS, CHUNK_BYTES // (4 * vocab_size))


def compute_dtype(tensor):
    """fp32 for every input dtype but fp64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def policy_loss_fwd(logps, rows, objective):
    """reference.policy_loss with its gradient in closed form. logps [M] -> (loss [M], g [M], metrics).

    `loss` is per row, weight applied; g = d(sum loss)/d(logp). The metrics are per row [M]; `policy_loss` is weighted.
    """
    advantages, weights = rows.advantages, rows.weights
    log_ratio = torch.zeros_like(logps) if rows.old_logps is None else logps - rows.old_logps
    per_sequence = objective.importance_sampling_level == "sequence"
    if per_sequence:
        log_ratio = _sequence_mean(log_ratio, rows.lengths)
    ratio = log_ratio.exp()
    low, high = 1 - objective.epsilon, 1 + objective.epsilon_high
    bounded = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
    unclipped, clipped = bounded * advantages, ratio.clamp(low, high) * advantages
    policy = -weights * torch.min(unclipped, clipped)
    # The gradient flows through the smaller branch, and there only where its clamp does not hold the ratio.
    flows = torch.where(unclipped <= clipped, bounded == ratio, (low <= ratio) & (ratio <= high))
    g = torch.where(flows, -weights * advantages * ratio, 0.0)
    if per_sequence:
        # Every token of the sequence moves the common ratio by 1/len: d(mean log-ratio)/d(logp_t) = 1/len.
        g = _sequence_mean(g, rows.lengths)
    kl = torch.zeros_like(logps)
    if objective.beta != 0:
        kl, dkl = _kl(rows.ref_logps - logps, objective.kl)
        g = g + objective.beta * weights * dkl
    metrics = {
        "policy_loss": policy,
        "kl": kl,
        "ratio": ratio,
        "clipped_low": (ratio < low) & (advantages < 0),
        "clipped_high": (ratio > high) & (advantages > 0),
    }
    return policy + objective.beta * weights * kl, g, metrics


def _kl(d, kind):
    """Estimators of KL(policy || reference) from d = ref - logp, and their derivative by logp."""
    if kind == "k1":
        return -d, torch.ones_like(d)
    if kind == "k2":
        return d.square() / 2, -d
    return torch.expm1(d) - d, -torch.expm1(d)  # k3 = e^d - d - 1


def _sequence_mean(values, lengths):
    """[M] -> [M]: each row gets the mean over its sequence. segment_reduce sums in a fixed order."""
    mean = torch.segment_reduce(values, "sum", lengths=lengths) / lengths.clamp(min=1)
    return mean.repeat_interleave(lengths, output_size=len(values))


def _row_slices(total, size):
    return [slice(start, min(start + size, total)) for start in range(0, max(total, 1), size)]


def _sequence_slices(lengths, size):
    """(rows, sequences) of chunks that end where sequences end; no sequence is longer than `size`."""
    parts, row, first, end = [], 0, 0, 0
    for i, length in enumerate(lengths):
        if end + length - row > size:
            parts.append((slice(row, end), slice(first, i)))
            row, first = end, i
        end += length
    return [*parts, (slice(row, end), slice(first, len(lengths)))]


def _policy_parts(hidden, weight, bias, rows, objective, size):
    """The chunks as (rows, sequences), and the policy loss where it has to be known before the first chunk.

    A sequence-level ratio needs all log-probs of its sequence: chunks end with sequences; one that is longer than a
    chunk costs a forward-only pass over all rows.
    """
    parts = [(part, slice(None)) for part in _row_slices(len(rows.targets), size)]
    if objective.importance_sampling_level == "token" or len(parts) == 1:
        return parts, None
    lengths = rows.lengths.tolist()
    if max(lengths) <= size:
        return _sequence_slices(lengths, size), None
    logps, _ = linear_logprob_fwd(hidden, weight, bias, rows.targets, rows.temperature, size, index=rows.index)
    return parts, policy_loss_fwd(logps, rows, objective)


def _weight_blocks(weight, dtype):
    """(vocabulary slice, weight[slice] in dtype): one block where no cast is needed, so that a cast stays small."""
    step = weight.shape[0] if weight.dtype == dtype else CAST_ROWS
    for start in range(0, weight.shape[0], step):
        yield slice(start, start + step), weight[start : start + step].to(dtype)


def _logits(hidden, weight, bias, temperature):
    """z [n, V] in hidden's dtype (fp32 or fp64): product 1."""
    z = hidden.new_empty(hidden.shape[0], weight.shape[0])
    for block, w in _weight_blocks(weight, hidden.dtype):
        torch.mm(hidden, w.T, out=z[:, block])
    if bias is not None:
        z += bias.to(z.dtype)
    if isinstance(temperature, torch.Tensor):
        z /= temperature.to(z.dtype)[:, None]
    elif temperature != 1:
        z /= temperature
    return z


def _softmax_(z, targets, return_entropy=False):
    """z [n, V] becomes softmax(z) in place; returns logps [n] and entropy [n] (or None)."""
    z -= z.amax(-1, keepdim=True)
    shifted_target = z.gather(-1, targets[:, None])[:, 0]
    shifted = z.clone() if return_entropy else None
    total = z.exp_().sum(-1)
    log_total = total.log()
    z /= total[:, None]
    # H = log S - sum_v p_v (z_v - max)
    entropy = log_total - shifted.mul_(z).sum(-1) if return_entropy else None
    return shifted_target - log_total, entropy


def _logit_gradient_(probs, targets, g):
    """dlogp/dz g = g (onehot_t - p), in place of the probabilities [n, V]."""
    probs *= -g[:, None]
    return probs.scatter_add_(-1, targets[:, None], g[:, None])


def _entropy_gradient(probs, logps, entropy, h):
    """dH/dz h = -h p (log p + H), [n, V]."""
    return (logps + entropy[:, None]).mul_(probs).mul_(-h[:, None])


def _cut(value, part):
    """A slice of a per-row value; floats and None stand for all rows."""
    return value[part] if isinstance(value, torch.Tensor) else value


def _no_autocast(tensor):
    return torch.autocast(tensor.device.type, enabled=False)


class _Gradients:
    """dH [N, D], dW [V, D], dbias [V], summed over chunks in fp32 (fp64 for fp64 inputs): products 2 and 3."""

    def __init__(self, hidden, weight, bias, needs):
        self.weight = weight
        self.dtype = compute_dtype(hidden)
        accumulator = {"dtype": self.dtype, "device": hidden.device}
        self.hidden = torch.zeros(hidden.shape, **accumulator) if needs[0] else None
        self.weight_sum = torch.zeros(weight.shape, **accumulator) if needs[1] else None
        self.bias_sum = torch.zeros(bias.shape, **accumulator) if needs[2] else None

    def add(self, dz, h, rows):
        """dz [n, V] and h [n, D] of the hidden rows `rows` (a slice or an index)."""
        if self.hidden is not None:
            products = (dz[:, block] @ w for block, w in _weight_blocks(self.weight, self.dtype))
            self.hidden[rows] = sum(products)
        if self.weight_sum is not None:
            self.weight_sum.addmm_(dz.T, h)
        if self.bias_sum is not None:
            self.bias_sum += dz.sum(0)

    def result(self):
        """In fp32 still: grad_output comes before the one rounding to the inputs' dtype, which is autograd's."""
        return self.hidden, self.weight_sum, self.bias_sum


def linear_logprob_fwd(hidden, weight, bias, targets, temperature, size, return_entropy=False, index=None):
    """logps [M] and entropy [M] (or None) of the rows `index` of hidden, by chunks of `size` rows: one product."""
    dtype = compute_dtype(hidden)
    logps = torch.empty(len(targets), dtype=dtype, device=hidden.device)
    entropy = torch.empty_like(logps) if return_entropy else None
    for part in _row_slices(len(targets), size):
        where = part if index is None else index[part]
        z = _logits(hidden[where].to(dtype), weight, bias, _cut(temperature, part))
        logps[part], part_entropy = _softmax_(z, targets[part], return_entropy)
        if return_entropy:
            entropy[part] = part_entropy
        del z  # before the next chunk's logits
    return logps, entropy


class LinearLogprob(torch.autograd.Function):
    """Log-probs and entropy with gradients of hidden, weight and bias; the backward recomputes the logits by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, size, return_entropy):
        with _no_autocast(hidden):
            logps, entropy = linear_logprob_fwd(hidden, weight, bias, targets, temperature, size, return_entropy)
        per_row = isinstance(temperature, torch.Tensor)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, temperature if per_row else None)
        ctx.temperature, ctx.size = None if per_row else temperature, size
        ctx.set_materialize_grads(False)
        return logps, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logps, grad_entropy):
        hidden, weight, bias, targets, entropy, temperature = ctx.saved_tensors
        temperature = ctx.temperature if temperature is None else temperature[:, None]
        grads = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        if grad_logps is None:
            grad_logps = torch.zeros(len(targets), dtype=grads.dtype, device=hidden.device)
        with _no_autocast(hidden):
            for part in _row_slices(len(targets), ctx.size):
                h, t = hidden[part].to(grads.dtype), _cut(temperature, part)
                z = _logits(h, weight, bias, 1).div_(t)
                all_logps = z.log_softmax(-1) if grad_entropy is not None else None
                _softmax_(z, targets[part])
                slope = 0
                if grad_entropy is not None:
                    slope = _entropy_gradient(z, all_logps, entropy[part], grad_entropy[part])
                dz = _logit_gradient_(z, targets[part], grad_logps[part]).add_(slope).div_(t)
                grads.add(dz, h, part)
                del z, dz, all_logps, slope  # before the next chunk's logits
        return *grads.result(), None, None, None, None


class LinearGRPO(torch.autograd.Function):
    """The fused loss -> loss (scalar) and a dict of [M]: logps, metrics, entropy on request. Only loss differentiates.

    `needs` tells which of hidden, weight, bias want a gradient: ctx.needs_input_grad stays True under no_grad.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, objective, size, needs, return_entropy):
        ctx.set_materialize_grads(False)
        dtype = compute_dtype(hidden)
        parts, known = _policy_parts(hidden, weight, bias, rows, objective, size)
        keep_dz = any(needs) and len(parts) == 1
        grads = _Gradients(hidden, weight, bias, needs) if any(needs) and not keep_dz else None
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        outputs, dz = [], None
        with _no_autocast(hidden):
            for part, sequences in parts:
                where = part if rows.index is None else rows.index[part]
                h, t, targets = hidden[where].to(dtype), _cut(rows.temperature, part), rows.targets[part]
                z = _logits(h, weight, bias, t)
                logps, entropy = _softmax_(z, targets, return_entropy)
                if known is None:
                    part_rows = PolicyRows(*(_cut(field, part) for field in rows[:-1]), _cut(rows.lengths, sequences))
                    part_loss, g, metrics = policy_loss_fwd(logps, part_rows, objective)
                else:
                    part_loss, g = known[0][part], known[1][part]
                    metrics = {name: values[part] for name, values in known[2].items()}
                loss += part_loss.sum(dtype=torch.float64)
                outputs.append({"logps": logps, **({"entropy": entropy} if return_entropy else {}), **metrics})
                if any(needs):
                    dz = _logit_gradient_(z, targets, (g / t).to(dtype))
                    if not keep_dz:
                        grads.add(dz, h, where)
                        dz = None
                del z  # before the next chunk's logits
        if keep_dz:
            ctx.save_for_backward(hidden, weight, bias, rows.index, dz)
        elif grads is not None:
            ctx.save_for_backward(*grads.result())
        ctx.keep_dz, ctx.needs = keep_dz, needs
        return loss.to(dtype), {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, _):
        if grad_loss is None:
            return (None,) * 8
        grads = ctx.saved_tensors
        if ctx.keep_dz:
            hidden, weight, bias, index, dz = grads
            where = slice(None) if index is None else index
            with _no_autocast(hidden):
                products = _Gradients(hidden, weight, bias, ctx.needs)
                products.add(dz, hidden[where].to(dz.dtype), where)
            grads = products.result()
        # Out of place: the saved gradients may be asked for again (retain_graph).
        return *(None if grad is None else grad * grad_loss for grad in grads), *(None,) * 5


class PolicyLoss(torch.autograd.Function):
    """The loss from log-probs [M] -> loss (scalar), metrics (dict of [M])."""

    @staticmethod
    def forward(ctx, logps, rows, objective):
        ctx.set_materialize_grads(False)
        logps = logps.to(compute_dtype(logps))
        loss, g, metrics = policy_loss_fwd(logps, rows, objective)
        ctx.save_for_backward(g)
        return loss.sum(dtype=torch.float64).to(loss.dtype), {"logps": logps.detach(), **metrics}

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, _):
        (g,) = ctx.saved_tensors
        return (None if grad_loss is None else g * grad_loss), None, None
