"""Validates the inputs of a loss, and packs them into the rows that the kernels compute.

Values of CPU tensors are validated. Values of CUDA tensors are not, to avoid a sync, except in torch's anomaly mode,
which asserts them on the device. Under torch.compile nothing is validated, since a graph cannot raise.

Shapes: N tokens, B prompts or sequences, T padded length, S sequences, M kept rows, V vocabulary, D hidden, R hidden of
the reference. A row is one token's row of the hidden states or logits. Kept rows are those that are computed.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fastgrpo.kernels.head_torch import ReferenceHead
from fastgrpo.kernels.objectives import PolicyRows
from fastgrpo.loss.objective import NOT_NEGATIVE, POSITIVE, TEMPERATURE, Interval, Objective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# kind of numbers, as named in errors -> whether a dtype is of that kind
KINDS = {
    "floating point": lambda dtype: dtype.is_floating_point,
    "integers": lambda dtype: not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool),
    "real numbers": lambda dtype: not dtype.is_complex,
}
BACKWARD_TOLERANCE = Interval(at_least=0, below=1)


class TokenInputs(NamedTuple):
    """The per-token inputs of a loss. The fields are documented as arguments of `linear_grpo_loss`.

    `grpo_loss` has no targets, and passes its log-probs instead.
    """

    targets: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | Sequence[int] | None = None
    rows: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    sampler_logps: torch.Tensor | None = None
    token_weights: torch.Tensor | None = None
    num_items_in_batch: int | torch.Tensor | None = None
    temperature: float | torch.Tensor = 1.0
    entropy_weights: torch.Tensor | None = None


def check_tensor(value: Any, name: str, kind: str, like: torch.Tensor | None = None, like_name: str = "") -> None:
    """Raise a ValueError unless a value is a tensor of this kind of numbers, on the device of `like`."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.device.type == "mps":
        raise ValueError(f"{name} is on an Apple GPU, which has no fp64 for exact sums; move the tensors to the CPU")
    if not KINDS[kind](value.dtype):
        raise ValueError(f"{name} must be {kind}, got {value.dtype}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like {like_name}, got {value.device}")


def check_constant(value: Any, name: str, tokens: torch.Tensor, kind: str = "real numbers") -> None:
    """Check a tensor that gets no gradient."""
    check_tensor(value, name, kind, tokens, "the tokens")
    if value.requires_grad:
        raise ValueError(f"{name} must not require grad: only the policy gets a gradient; detach it")


def check_values(
    values: torch.Tensor, name: str, rule: str, legal: Callable[[torch.Tensor], torch.Tensor],
    index: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Check the values of a tensor, unless this would sync with a GPU.

    `rule` follows "must" in errors, and `legal` maps the numbers to bool, True where the rule holds. `index` holds the
    positions of the numbers in the caller's tensor, or None if `values` is the whole tensor.
    """
    if not values.numel() or torch.compiler.is_compiling():
        return
    if _on_host(values):
        kept = legal(values)
        if not kept.all():
            first = (~kept).flatten().nonzero()[0, 0]
            place = first if index is None else index.flatten()[first]
            raise ValueError(f"{name} must {rule}, got {values.flatten()[first].item()} at index {place.item()}")
    elif torch.is_anomaly_enabled():  # asynchronous: a later call raises
        torch._assert_async(legal(values).all(), f"{name} must {rule}")


def _on_host(values):
    return values.device.type == "cpu"


def _check_shape(value, name, shape, dims=""):
    if value.shape != shape:
        raise ValueError(f"{name} must have the shape {dims}{tuple(shape)}, got {tuple(value.shape)}")


def check_head(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, logit_softcap: float | None,
    targets: torch.Tensor,
) -> None:  # fmt: skip
    """Check that hidden states [..., D], a head [V, D] with a bias [V], and targets [...] fit each other."""
    if logit_softcap is not None:
        POSITIVE.check("logit_softcap", logit_softcap)
    check_tensor(hidden, "hidden", "floating point")
    check_tensor(weight, "weight", "floating point", hidden, "hidden")
    _check_shape(weight, "weight", (*weight.shape[:1], hidden.shape[-1]), "[V, D]=")
    if bias is not None:
        check_tensor(bias, "bias", "floating point", hidden, "hidden")
        _check_shape(bias, "bias", weight.shape[:1], "[V]=")
    check_targets(targets, hidden, "hidden")


def check_targets(targets: torch.Tensor, like: torch.Tensor, name: str) -> None:
    """Check that targets [...] are integers, one for each row of hidden states or logits."""
    check_tensor(targets, "targets", "integers", like, name)
    _check_shape(targets, "targets", like.shape[:-1])


def check_backward_tolerance(
    tolerance: float, objective: Objective | None = None, return_entropy: bool = False
) -> None:
    """Check the share of a row's gradient that may be dropped. It bounds the gradient of log-probs only."""
    BACKWARD_TOLERANCE.check("backward_tolerance", tolerance)
    dense = "return_entropy=True" if return_entropy else ""
    if objective is not None and objective.entropy_coef != 0:
        dense = f"entropy_coef={objective.entropy_coef}"
    elif objective is not None and objective.full_kl:
        dense = "kl='full'"
    if tolerance and dense:
        raise ValueError(
            f"backward_tolerance={tolerance} bounds the gradient of log-probs, but {dense} has a gradient in every "
            "column of the vocabulary; pass backward_tolerance=0"
        )


def reference_head(
    objective: Objective, hidden: torch.Tensor, weight: torch.Tensor, ref_hidden: Any, ref_weight: Any, ref_bias: Any,
    process_group: "ProcessGroup | None",
) -> ReferenceHead | None:  # fmt: skip
    """Check the reference's hidden states [..., R] and head [V, R] if the objective needs them; else return None."""
    if not objective.full_kl:
        return None
    if process_group is not None:
        raise ValueError(
            "kl='full' does not support a head that is sharded over process_group; pass the whole head, or use an "
            "estimator, such as kl='k3'"
        )
    given = {"ref_hidden": ref_hidden, "ref_weight": ref_weight, "ref_bias": ref_bias}
    for name, value in given.items():
        if value is not None:
            check_constant(value, name, hidden, "floating point")
        elif name != "ref_bias":
            raise ValueError(f"beta={objective.beta} with kl='full' needs {name}; pass it, or beta=0")
    width = ref_hidden.shape[-1]
    _check_shape(ref_hidden, "ref_hidden", (*hidden.shape[:-1], width), "[..., R]=")
    _check_shape(ref_weight, "ref_weight", (len(weight), width), "[V, R]=")
    if ref_bias is not None:
        _check_shape(ref_bias, "ref_bias", weight.shape[:1], "[V]=")
    return ReferenceHead(ref_hidden.reshape(-1, width), ref_weight, ref_bias)


def check_temperature(temperature: float | torch.Tensor, tokens: torch.Tensor) -> float | torch.Tensor:
    """Check a temperature, and flatten one per token. `check_kept` checks the values of the kept rows."""
    if isinstance(temperature, torch.Tensor):
        check_constant(temperature, "temperature", tokens)
    else:
        TEMPERATURE.check("temperature", temperature)
    return _per_token(temperature, "temperature", tokens.shape)


def _check_tokens(inputs):
    """Check each input separately. `check_kept` checks the values of the kept rows."""
    check_constant(inputs.advantages, "advantages", inputs.targets)
    for name in ("mask", "old_logps", "ref_logps", "sampler_logps", "token_weights", "entropy_weights"):
        if getattr(inputs, name) is not None:
            check_constant(getattr(inputs, name), name, inputs.targets)
    if inputs.mask is not None and inputs.mask.dtype != torch.bool:
        check_values(inputs.mask, "mask", "be 0, or positive where a token counts", lambda mask: mask >= 0)
    if inputs.rows is not None:
        _check_rows(inputs.rows, inputs.targets)
    count = inputs.num_items_in_batch
    if isinstance(count, torch.Tensor):
        if count.numel() != 1:
            raise ValueError(f"num_items_in_batch must be one number, got shape {tuple(count.shape)}")
        check_values(count, "num_items_in_batch", "be finite and at least 0", lambda n: n.isfinite() & (n >= 0))
    elif count is not None:
        NOT_NEGATIVE.check("num_items_in_batch", count)


def _check_rows(rows, tokens):
    """Check that the caller's rows [M] are strictly increasing indices of the N tokens."""
    if isinstance(rows, torch.Tensor) and rows.dtype == torch.bool:
        raise ValueError("rows must be indices, got a bool mask; pass mask.flatten().nonzero().squeeze(1)")
    check_tensor(rows, "rows", "integers")
    if rows.ndim != 1:
        raise ValueError(f"rows must be [M], got shape {tuple(rows.shape)}")
    if rows.device not in (torch.device("cpu"), tokens.device):
        raise ValueError(f"rows must be on cpu, or on {tokens.device} like the tokens, got {rows.device}")
    total = tokens.numel()

    def legal(rows):
        before = torch.cat([rows.new_full((1,), -1), rows[:-1]])
        return (rows > before) & (rows < total)

    check_values(rows.long(), "rows", f"increase strictly within [0, {total})", legal)


def _check_whole(rows, mask, cu_seqlens):
    """Check that rows [M] hold all masked-in tokens of the sequences they touch, and no other tokens.

    Otherwise a sequence-level objective would silently use a part of a sequence.
    """

    def legal(mask):
        chosen = torch.zeros_like(mask).index_fill_(0, rows.to(mask.device), True)
        lengths = cu_seqlens.diff()
        touched = torch.segment_reduce(chosen.float(), "max", lengths=lengths, initial=0, unsafe=True) > 0
        return chosen == (mask & touched.repeat_interleave(lengths, output_size=len(mask)))

    rule = "match rows exactly within each sequence that rows touch"
    check_values(mask, "mask", rule, legal)


def _check_needs(objective, inputs, has_sequences, coupled):
    """Check that the objective has all inputs it needs, and that entropy_weights have an entropy bonus."""
    if objective.beta != 0 and not objective.full_kl and inputs.ref_logps is None:
        raise ValueError(f"beta={objective.beta} needs ref_logps; pass them, or beta=0")
    if inputs.entropy_weights is not None and objective.entropy_coef == 0:
        raise ValueError(
            f"entropy_weights needs an entropy_coef other than 0, got entropy_coef={objective.entropy_coef}; omit "
            "entropy_weights, or set entropy_coef"
        )
    with_sampler = inputs.sampler_logps is not None
    if with_sampler:
        objective.check_sampler()
    if not has_sequences and (coupled or (objective.needs_sequences and inputs.token_weights is None)):
        mode = f", importance_sampling_mode={objective.importance_sampling_mode!r}" if with_sampler else ""
        raise ValueError(
            f"cu_seqlens is needed by loss_type={objective.loss_type!r}, "
            f"importance_sampling_level={objective.importance_sampling_level!r}{mode} in the packed layout"
        )


def check_kept(kept: PolicyRows, vocab_size: int | None = None) -> None:
    """Check the values of the kept rows. Other rows are not read.

    Log-probs of the policy, the old policy and the reference may be NaN: the loss is then NaN, and a trainer may skip
    the update. On a GPU the kernels return NaN for a target outside the vocabulary.
    """
    if vocab_size is not None:
        rule = f"be in [0, {vocab_size}) on active rows"
        check_values(kept.targets, "targets", rule, lambda ids: (ids >= 0) & (ids < vocab_size), kept.index)
    for name, values in (("advantages", kept.advantages), ("token_weights", kept.weights)):
        if values is not None:
            check_values(values, name, "be finite on active rows", torch.isfinite, kept.index)
    if kept.sampler_logps is not None:
        rule = "be finite, or NaN where the sampler reported none, on active rows"
        check_values(kept.sampler_logps, "sampler_logps", rule, lambda logps: ~logps.isinf(), kept.index)
    if isinstance(kept.temperature, torch.Tensor):
        lowest = TEMPERATURE.at_least
        rule = f"be finite and {TEMPERATURE.text} on active rows"
        check_values(kept.temperature, "temperature", rule, lambda ts: ts.isfinite() & (ts >= lowest), kept.index)


def _per_token(value, name, shape):
    """Flatten a tensor with one value per token. A float or None is returned unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    _check_shape(value, name, shape)
    return value.reshape(-1)


def _spread(advantages, shape, cu_seqlens):
    """Return advantages [N], from one value per token or one per sequence [S]."""
    if advantages.shape == shape:
        return advantages.reshape(-1)
    if cu_seqlens is not None and advantages.shape == (len(cu_seqlens) - 1,):
        return advantages.repeat_interleave(cu_seqlens.diff(), output_size=shape.numel())
    hint = "" if cu_seqlens is not None else " (one value per sequence needs cu_seqlens)"
    raise ValueError(
        f"advantages must be per token {tuple(shape)} or per sequence, got {tuple(advantages.shape)}{hint}"
    )


def _sequences(tokens, cu_seqlens):
    """Return the boundaries of the sequences, [S+1] int64, on the device and on the host.

    Both are None for packed tokens without cu_seqlens. The host's is None if cu_seqlens is on a GPU, and under
    torch.compile.
    """
    shape, compiling = tokens.shape, torch.compiler.is_compiling()
    if tokens.ndim == 2:
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens needs the packed layout [N], but the tokens are {tuple(shape)}; omit it")
        on_host = None if compiling else torch.arange(shape[0] + 1) * shape[1]
        return torch.arange(shape[0] + 1, device=tokens.device) * shape[1], on_host
    if tokens.ndim != 1:
        raise ValueError(f"tokens must be [B, T] or packed [N], got {tuple(shape)}")
    if cu_seqlens is None:
        return None, None
    cu_seqlens = torch.as_tensor(cu_seqlens)
    check_tensor(cu_seqlens, "cu_seqlens", "integers")
    if cu_seqlens.ndim != 1 or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens must be [S+1], got shape {tuple(cu_seqlens.shape)}")
    cu_seqlens, total = cu_seqlens.long(), shape[0]

    def legal(starts):
        low = torch.cat([starts.new_zeros(1), starts[:-1]])
        high = torch.cat([starts[1:], starts.new_full((1,), total)])
        legal = (starts >= low) & (starts <= high)
        legal[0] &= starts[0] == 0
        legal[-1] &= starts[-1] == total
        return legal

    check_values(cu_seqlens, "cu_seqlens", f"be non-decreasing from 0 to N={total}", legal)
    on_host = None if compiling or not cu_seqlens.is_cpu else cu_seqlens
    return to_device(cu_seqlens, tokens.device), on_host


def keep_rows(
    inputs: TokenInputs, objective: Objective, compact: bool = True, dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
) -> PolicyRows:  # fmt: skip
    """Validate the inputs, compute the weights over all tokens, and drop the rows that carry no gradient.

    If `inputs.rows` is None, `compact` allows a sync to find the rows that carry gradient. Without it, the result has
    all rows: active ones first, and finite dummies in the others. Weights and advantages are converted to `dtype`, fp32
    or fp64 like the log-probs, or to fp64 if the advantages are fp64. Targets must be below `vocab_size`.
    """
    if objective.beta == 0:
        inputs = inputs._replace(ref_logps=None)
    _check_tokens(inputs)
    targets, rows = inputs.targets, None if inputs.rows is None else inputs.rows.long()
    shape, total, device = targets.shape, targets.numel(), targets.device
    cu_seqlens, host_cu_seqlens = _sequences(targets, inputs.cu_seqlens)
    coupled = objective.couples_tokens(inputs.sampler_logps is not None)
    _check_needs(objective, inputs, cu_seqlens is not None, coupled)
    dtype = torch.float64 if torch.float64 in (dtype, inputs.advantages.dtype) else torch.float32
    mask = _per_token(inputs.mask, "mask", shape)
    mask = torch.ones(total, dtype=torch.bool, device=device) if mask is None else mask != 0
    if inputs.token_weights is None:
        weights = objective.token_weights(mask, cu_seqlens, inputs.num_items_in_batch, dtype)
    else:
        weights = _per_token(inputs.token_weights, "token_weights", shape).masked_fill(~mask, 0)
    entropy_weights = None
    if objective.entropy_coef != 0:
        entropy_weights = _per_token(inputs.entropy_weights, "entropy_weights", shape)
        if entropy_weights is None:
            entropy_weights = objective.entropy_weights(mask, inputs.num_items_in_batch, dtype)
        else:
            entropy_weights = objective.entropy_coef * entropy_weights.to(dtype).masked_fill(~mask, 0)
    advantages = _spread(inputs.advantages, shape, cu_seqlens).to(dtype)
    active = host_lengths = None
    if rows is not None:
        index = None if len(rows) == total else to_device(rows, device)
        if coupled and (index is not None or inputs.mask is not None):
            _check_whole(rows, mask, cu_seqlens)
        if coupled and host_cu_seqlens is not None and (index is None or rows.is_cpu):
            bounds = host_cu_seqlens if index is None else torch.searchsorted(rows, host_cu_seqlens)
            host_lengths = tuple(bounds.diff().tolist())
    else:
        active = _active_rows(objective, mask, weights, advantages, cu_seqlens if coupled else None)
        index = active.nonzero()[:, 0] if compact else torch.argsort(~active, stable=True)
        if compact and len(index) == total:
            index = None
    lengths = _kept_lengths(cu_seqlens, index, active, compact) if coupled else None
    active = None if active is None or compact else active[index]

    def keep(value, dummy=0):
        if index is None or not isinstance(value, torch.Tensor):
            return value
        kept = value[index]
        return kept if active is None else torch.where(active, kept, dummy)

    def keep_input(name):
        return keep(_per_token(getattr(inputs, name), name, shape))

    kept = PolicyRows(
        index=index,
        targets=keep(targets.reshape(-1)).contiguous(),
        temperature=keep(check_temperature(inputs.temperature, targets), dummy=1),
        advantages=keep(advantages),
        weights=keep(weights.to(dtype)),
        old_logps=keep_input("old_logps"),
        ref_logps=keep_input("ref_logps"),
        lengths=lengths,
        sampler_logps=keep_input("sampler_logps"),
        entropy_weights=keep(entropy_weights),
        active=active,
        host_lengths=host_lengths,
    )
    check_kept(kept, vocab_size)
    return kept


def _kept_lengths(cu_seqlens, index, active, compact):
    """Count the kept rows of each sequence, [S]; if inactive rows follow, count these as one more, [S+1]."""
    lengths = cu_seqlens.diff()
    if index is None:
        return lengths
    if active is None:
        return torch.searchsorted(index, cu_seqlens).diff()
    counts = torch.segment_reduce(active.float(), "sum", lengths=lengths, unsafe=True).long()
    return counts if compact else torch.cat([counts, len(active) - counts.sum(0, keepdim=True)])


def _active_rows(objective, mask, weights, advantages, cu_seqlens):
    """Return the rows that carry gradient, [N] bool: masked in, weight not 0 and, at beta = 0, advantage not 0.

    With an entropy bonus, all masked-in rows carry gradient. With `cu_seqlens`, whole sequences are kept or dropped,
    since a token without weight still changes the factor of its sequence.
    """
    active = mask & (weights != 0)
    if objective.beta == 0:
        active &= advantages != 0
    if objective.entropy_coef != 0:
        active = mask
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff()
        any_active = torch.segment_reduce(active.float(), "max", lengths=lengths, initial=0, unsafe=True) > 0
        active = mask & any_active.repeat_interleave(lengths, output_size=len(mask))
    return active


def staged(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Pin a host tensor that will be copied to a GPU.

    CUDA copies asynchronously only from pinned memory. torch's allocator reuses a pinned block only after the stream
    has finished the copy, so the caller need not keep the tensor.
    """
    to_gpu = value.device.type == "cpu" and torch.device(device).type == "cuda"
    if not to_gpu or not value.numel() or torch.compiler.is_compiling():
        return value
    return value.contiguous().pin_memory()


def to_device(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Move a tensor to a device without a sync."""
    return staged(value, device).to(device, non_blocking=True)
