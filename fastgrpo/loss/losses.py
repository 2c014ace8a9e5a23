"""The public losses: hidden states, logits or log-probs of a batch -> loss, log-probs and metrics.

    loss = sum_n w_n (I_n s_n + beta KL_n) - entropy_coef sum_n e_n H_n

s_n is the surrogate of the objective, -min(r_n A_n, clip(r_n) A_n) for GRPO (arXiv 2402.03300 eq. 3), with the ratio
r_n = exp(logp_n - old_n); I_n is the importance weight against the sampler. docs/objectives.md explains every symbol of
every objective. The losses are computed in these files:

| loss             | formula in plain PyTorch (kernels/)    | Triton (kernels/) | without Triton (kernels/) |
|------------------|----------------------------------------|-------------------|---------------------------|
| grpo_loss        | reference.py: policy_loss              | logits.py         | objectives.py             |
| logits_grpo_loss | reference.py: logits_grpo_loss         | logits.py         | head_torch.py             |
| linear_grpo_loss | reference.py: linear_grpo_loss         | head.py           | head_torch.py             |
| its kl="full"    | reference.py: full_kl                  | none              | head_torch.py             |

The weights w_n and their formulas stand at the end of objective.py. tests/loss/ compares the losses with reference.py
on a CPU, and tests/kernels/interpreted/ does so for the Triton kernels. benchmarks/bench_loss.py times linear_grpo_loss
on a CPU, and benchmarks/bench_head.py on a GPU.

Shapes: N tokens, B prompts or sequences, T padded length, S sequences, M kept rows, V vocabulary, D hidden. Two layouts
are read: padded, hidden [B, T, D] with per-token tensors [B, T]; and packed, hidden [N, D] with per-token tensors [N]
and `cu_seqlens` [S+1], the row where each sequence starts and the end of the last.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fastgrpo.kernels import head_torch, objectives
from fastgrpo.kernels.head_torch import Vocabulary
from fastgrpo.kernels.objectives import compute_dtype, needed
from fastgrpo.loss.checks import (
    HAS_TRITON,
    cast_for_autocast,
    check_backward_tolerance,
    check_head,
    check_token_ids,
    choose_backend,
    compacts,
)
from fastgrpo.loss.full_kl import reference_head, refuse_full_kl
from fastgrpo.loss.inputs import TokenInputs
from fastgrpo.loss.objective import Objective
from fastgrpo.loss.output import GRPOLossOutput, loss_output
from fastgrpo.loss.rows import keep_rows
from fastgrpo.loss.values import check_targets, check_tensor

if HAS_TRITON:
    from fastgrpo.kernels import head as head_kernels
    from fastgrpo.kernels import logits as logits_kernels
    from fastgrpo.loss import self_check
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensor = torch.Tensor


def linear_grpo_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, *, mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None, rows: Tensor | None = None, old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None, sampler_logps: Tensor | None = None, token_weights: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None, temperature: float | Tensor = 1.0, bias: Tensor | None = None,
    logit_softcap: float | None = None, return_entropy: bool = False, ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None, ref_bias: Tensor | None = None, compact: str | None = None,
    process_group: "ProcessGroup | None" = None, backend: str = "auto", objective: Objective | None = None,
    entropy_weights: Tensor | None = None, backward_tolerance: float = 0.0, **knobs: Any,
) -> GRPOLossOutput:  # fmt: skip
    """Compute the GRPO loss of a language-model head, fused: no logits in memory, three matrix products with gradients.

    Args:
        hidden: [B, T, D] or packed [N, D]: the state that predicts the token at the same place of `targets`.
        weight: [V, D], the head.
        targets: [B, T] or [N] integers; those of inactive rows are never read (-100 is legal).
        advantages: [B] or [B, T]; packed [S] or [N].
        mask: [B, T] or [N], positive where a token counts and 0 elsewhere; None is everywhere.
        cu_seqlens: [S+1] integers, packed layout only. They are needed by advantages [S], by the loss types grpo,
            dr_grpo, sapo, luspo and vespo, and by sequence-level ratios and importance weights.
        rows: [M] integers that rise strictly: the flat indices of the rows that carry gradient, where the caller knows
            them. Only these are computed. Where the objective looks at whole sequences (sequence-level ratios or
            importance weights, vespo) they must be all the masked-in tokens of the sequences that they touch; with an
            entropy bonus all masked-in tokens. On the host, with cu_seqlens there too, they cost no wait for the
            device.
        old_logps: Log-probs under the policy that drew the tokens. None on the first update of a rollout, where they
            equal the current ones and the ratio is 1.
        ref_logps: Log-probs under the reference, needed where beta is not 0 and kl is not "full".
        sampler_logps: Log-probs that the sampler (vLLM, SGLang, ...) reported, NaN where it reported none. The
            surrogate is multiplied by exp(old - sampler) as `importance_sampling_mode` and its bounds say. None applies
            no such weights.
        token_weights: [B, T] or [N], the w_n in place of those of `loss_type`; the mask still applies.
        num_items_in_batch: Tokens of the whole step, read by dapo, cispo, vespo and the entropy bonus. None counts
            the mask, and less than 1, in a step without tokens, counts as 1.
        temperature: A float, or per token: the one that the tokens were drawn at. At least 1e-30.
        bias: [V] or None.
        logit_softcap: As in `linear_logprob`.
        return_entropy: Whether to return `entropies` in nats, and their mean over active rows as the metric `entropy`.
        ref_hidden: [B, T, R] or [N, R], the reference's hidden states at the same tokens; R may differ from D. Where
            beta is not 0 and kl is "full", it takes the place of ref_logps, with ref_weight.
        ref_weight: [V, R], the reference's head. Its logits have the temperature and the soft-cap of the policy's.
        ref_bias: [V], the bias of the reference's head, or None.
        compact: An argument for trainers of your own; the engine here passes `rows` instead. The triton backend reads
            it where `rows` is not given. None computes the rows without gradient too, with hidden states of 0, because
            only the device knows which rows these are; a sequence-level objective of more than one chunk then takes a
            forward pass first. "sync" waits until the host knows these rows, and leaves them out.
        process_group: An argument for trainers of your own; the engine here does not pass it. It holds the ranks over
            which the rows of weight and bias are sharded, as in `linear_logprob`.
        backend: "auto" (triton for bf16 on CUDA, else chunked, and chunked for kl="full" and for a
            backward_tolerance), "chunked" or "triton".
        objective: The objective, in place of `knobs`.
        entropy_weights: [B, T] or [N], the e_n of the entropy bonus in place of 1 / tokens of the step; the mask still
            applies. None where entropy_coef is 0.
        backward_tolerance: tau in [0, 1). The backward may leave out columns of the vocabulary, never a target's, that
            hold at most tau (1 - p_target) of the probability of every row: the 1-norm of a row's gradient by its
            logits, |dz_n|_1 = 2 |g_n| (1 - p_target) / temperature, then errs by at most tau / 2 of itself, and dH_n by
            at most tau |g_n| (1 - p_target) / temperature times the largest norm of a row of the weight
            (kernels/head_torch.py). Loss, log-probs and metrics stay exact. 0 is the exact gradient. The metrics
            `head/kept_columns` (share of the vocabulary) and `head/dropped_mass` (the largest of a row, relative to its
            1 - p_target; at most tau) say what was done. On a GPU the host waits for the number of columns, once a
            chunk.
        knobs: Fields of `Objective` by name: loss_type="dapo", epsilon=0.2, beta=0.0, ...

    Returns:
        The loss, the log-probs, which rows were active, and the metrics.

    Raises:
        ValueError: A tensor has the wrong shape, device or kind of numbers; something by which the loss is not
            differentiated requires grad; backward_tolerance is given with entropy_coef or kl="full"; beta is not 0 and
            what the KL needs of the reference is missing; kl is "full"
            with backend "triton" or a process_group; entropy_weights are given and entropy_coef is 0; both objective
            and knobs are given; or `Objective` refuses a knob.
            On the CPU also: an active row has a target outside [0, V), or a number that is not finite where it must be;
            rows or cu_seqlens do not rise; or the mask is negative or NaN.
    """
    objective = Objective.of(objective, knobs)
    check_head(hidden, weight, bias, logit_softcap, targets)
    check_backward_tolerance(backward_tolerance, objective)
    reference = reference_head(
        objective, hidden, weight, ref_logps, ref_hidden, ref_weight, ref_bias, process_group
    )  # fmt: skip
    alone = ["kl='full'"] if objective.full_kl else ["backward_tolerance"] if backward_tolerance else []
    hidden, weight = cast_for_autocast("chunked" if alone else backend, hidden, weight)
    asked, backend = backend, choose_backend(backend, alone, hidden=hidden, weight=weight)
    vocabulary = Vocabulary.of(weight, process_group)
    inputs = TokenInputs(targets.long(), advantages, mask, cu_seqlens, rows, old_logps, ref_logps, sampler_logps,
                         token_weights, num_items_in_batch, temperature, entropy_weights)  # fmt: skip
    kept = keep_rows(inputs, objective, compacts(compact, backend, targets), compute_dtype(hidden))
    check_targets(kept.targets, vocabulary.total, kept.index)
    flat = hidden.reshape(-1, hidden.shape[-1])

    def fused(states, kept, weight, bias):
        located, group = vocabulary.located(kept.targets, len(weight))
        return head_kernels.linear_grpo_loss(
            states, weight, bias, kept._replace(targets=located), objective, return_entropy=return_entropy,
            softcap=logit_softcap, group=group,
        )  # fmt: skip

    def plain(states, kept, weight, bias):
        return head_torch.LinearGRPO.apply(
            states, weight, bias, kept, objective, head_torch.chunk_rows(vocabulary.largest),
            needed(states, weight, bias), return_entropy, vocabulary, logit_softcap, reference, backward_tolerance,
        )  # fmt: skip

    # Ranks that share a vocabulary would have to fail together, so each takes the kernel as it is.
    if backend == "triton" and process_group is None:
        head = {"weight": weight.detach(), "bias": None if bias is None else bias.detach()}
        ways = partial(fused, **head), partial(plain, **head)
        options = {"entropy": return_entropy, "head": tuple(weight.shape), "bias": bias is not None,
                   "soft-cap": logit_softcap is not None, "gradient": any(needed(flat, weight, bias))}  # fmt: skip
        if not _trusts("linear_grpo_loss", ways, flat, kept, objective, asked, options):
            backend, kept = "chunked", keep_rows(inputs, objective, True, compute_dtype(hidden))
    loss, outputs = (fused if backend == "triton" else plain)(flat, kept, weight, bias)
    return loss_output(loss, outputs, kept, targets)


def _trusts(name, ways, states, kept, objective, asked, options):
    """Whether the self-check trusts the kernel of a loss; `options` tell apart what its other arguments compile to."""
    if torch.compiler.is_compiling() or not len(kept.targets):
        return True
    knobs = ("surrogate", "kl", "correct_kl", "low", "high", "delta", "beta", "tau_pos", "tau_neg")
    given = ("lengths", "entropy_weights", "old_logps", "ref_logps", "sampler_logps")
    variant = {
        "dtype": states.dtype,
        "aligned": states.data_ptr() % 16 == 0,
        **options,
        "temperatures": isinstance(kept.temperature, torch.Tensor),
        **{knob: value if isinstance(value, (str, bool)) else value is not None
           for knob, value in zip(knobs, objectives.kernel_knobs(objective), strict=True)},
        **{name: getattr(kept, name) is not None for name in given},
    }  # fmt: skip
    return self_check.trusted(
        name, states.device, variant,
        lambda: self_check.losses_differ(*ways, states, kept, options["gradient"]),
        self_check.ANY_BACKEND if asked == "triton" else None,
    )  # fmt: skip


def logits_grpo_loss(
    logits: Tensor, targets: Tensor, advantages: Tensor, *, mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None, rows: Tensor | None = None, old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None, sampler_logps: Tensor | None = None, token_weights: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None, temperature: float | Tensor = 1.0, return_entropy: bool = False,
    inplace: bool = False, compact: str | None = None, backend: str = "auto", objective: Objective | None = None,
    **knobs: Any,
) -> GRPOLossOutput:  # fmt: skip
    """Compute the same loss from logits.

    Beside the logits, the forward keeps only vectors over the kept rows in memory, and the backward makes one gradient
    tensor in the shape and dtype of the logits. The chunked backend works on one chunk of rows in fp32 (64 MiB).

    Args:
        logits: [B, T, V] or packed [N, V] floating point, differentiable, before the temperature. Rows that are not
            active are never read; their gradient is 0.
        targets: As in `linear_grpo_loss`, and so is every argument without a description of its own here.
        advantages: [B] or [B, T]; packed [S] or [N].
        mask: [B, T] or [N], or None.
        cu_seqlens: [S+1], or None.
        rows: [M] integers, or None.
        old_logps: [B, T] or [N], or None.
        ref_logps: [B, T] or [N], or None.
        sampler_logps: [B, T] or [N], or None.
        token_weights: [B, T] or [N], or None.
        num_items_in_batch: Tokens of the whole step, or None.
        temperature: A float, or per token.
        return_entropy: Whether to return `entropies` and the metric `entropy`.
        inplace: Whether the gradient is written over the logits, so that there is no second [N, V] tensor. The backward
            does so, or (triton, where no token's loss looks at its sequence) already the forward, in one read and one
            write. The values of the logits are gone then: nothing else may need them, and autograd raises an error on a
            second backward. Logits that no view can flatten are copied first, and the copy is overwritten.
        compact: None or "sync", for trainers of your own; the engine here does not call this loss.
        backend: "auto", "chunked" or "triton".
        objective: The objective, in place of `knobs`.
        knobs: Fields of `Objective` by name.

    Returns:
        As `linear_grpo_loss`.

    Raises:
        ValueError: As `linear_grpo_loss`, and for kl="full", which needs the reference's hidden states and head.
    """
    check_tensor(logits, "logits", "floating point")
    asked, backend = backend, choose_backend(backend, logits=logits)
    objective = Objective.of(objective, knobs)
    refuse_full_kl(objective, "logits")
    check_token_ids(targets, logits, "logits")
    if not logits.shape[-1]:
        raise ValueError(f"logits must hold at least one token of the vocabulary, got shape {tuple(logits.shape)}")
    inputs = TokenInputs(targets.long(), advantages, mask, cu_seqlens, rows, old_logps, ref_logps, sampler_logps,
                         token_weights, num_items_in_batch, temperature)  # fmt: skip
    kept = keep_rows(inputs, objective, compacts(compact, backend, targets), compute_dtype(logits))
    vocab_size = logits.shape[-1]
    check_targets(kept.targets, vocab_size, kept.index)
    flat = logits.reshape(-1, vocab_size)

    def fused(states, kept):
        return logits_kernels.logits_grpo_loss(states, kept, objective, return_entropy=return_entropy, inplace=inplace)

    def plain(states, kept):
        return head_torch.LogitsGRPO.apply(
            states, kept, objective, head_torch.chunk_rows(vocab_size), return_entropy, inplace
        )

    options = {"entropy": return_entropy, "in place": inplace, "vocabulary": vocab_size,
               "compacted": kept.index is not None, "gradient": needed(flat)[0]}  # fmt: skip
    if backend == "triton" and not _trusts(
        "logits_grpo_loss", (fused, plain), flat, kept, objective, asked, options
    ):  # fmt: skip
        backend, kept = "chunked", keep_rows(inputs, objective, True, compute_dtype(logits))
    loss, outputs = (fused if backend == "triton" else plain)(flat, kept)
    return loss_output(loss, outputs, kept, targets)


def grpo_loss(
    logps: Tensor, old_logps: Tensor | None, advantages: Tensor, *, mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None, rows: Tensor | None = None, ref_logps: Tensor | None = None,
    sampler_logps: Tensor | None = None, token_weights: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None, compact: str | None = None, backend: str = "auto",
    objective: Objective | None = None, **knobs: Any,
) -> GRPOLossOutput:  # fmt: skip
    """Compute the same loss from log-probs.

    Args:
        logps: [B, T] or packed [N] log-probs of the tokens under the policy, differentiable.
        old_logps: As in `linear_grpo_loss`, and so is every argument without a description of its own here.
        advantages: [B] or [B, T]; packed [S] or [N].
        mask: [B, T] or [N], or None.
        cu_seqlens: [S+1], or None.
        rows: [M] integers, or None.
        ref_logps: [B, T] or [N], or None.
        sampler_logps: [B, T] or [N], or None.
        token_weights: [B, T] or [N], or None.
        num_items_in_batch: Tokens of the whole step, or None.
        compact: None or "sync", for trainers of your own; the engine here does not call this loss.
        backend: "auto", "chunked" or "triton".
        objective: The objective, in place of `knobs`.
        knobs: Fields of `Objective` by name.

    Returns:
        As `linear_grpo_loss`.

    Raises:
        ValueError: As `linear_grpo_loss`, for an entropy bonus, which needs logits, and for kl="full", which needs the
            reference's hidden states and head.
    """
    check_tensor(logps, "logps", "floating point")
    asked, backend = backend, choose_backend(backend, logps=logps)
    objective = Objective.of(objective, knobs)
    refuse_full_kl(objective, "log-probs")
    if objective.entropy_coef != 0:
        raise ValueError(
            f"entropy_coef={objective.entropy_coef} needs the logits: use linear_grpo_loss or logits_grpo_loss, or "
            "subtract the mean of linear_logprob's entropy"
        )
    inputs = TokenInputs(logps.detach(), advantages, mask, cu_seqlens, rows, old_logps, ref_logps, sampler_logps,
                         token_weights, num_items_in_batch)  # fmt: skip
    kept = keep_rows(inputs, objective, compacts(compact, backend, logps), compute_dtype(logps))
    flat = logps.reshape(-1)
    flat = flat if kept.index is None else flat[kept.index]
    if kept.active is not None:
        flat = torch.where(kept.active, flat, 0)

    def fused(states, kept):
        return objectives.PolicyLoss.apply(states, kept, objective, logits_kernels.policy_loss_fwd)

    def plain(states, kept):
        return objectives.PolicyLoss.apply(states, kept, objective, objectives.policy_loss_fwd)

    if backend == "triton" and not _trusts(
        "grpo_loss", (fused, plain), flat, kept, objective, asked, {"gradient": needed(flat)[0]}
    ):  # fmt: skip
        backend = "chunked"
    loss, outputs = (fused if backend == "triton" else plain)(flat, kept)
    return loss_output(loss, outputs, kept, logps)
