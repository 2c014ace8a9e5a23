"""The public log-prob of a language-model head: hidden states -> log-probs and entropy, without logits in memory.

The formula is in kernels/head.py (Triton) and kernels/head_torch.py (plain PyTorch). Tests compare both with the plain
function in kernels/reference.py.

Shapes: V vocabulary, D hidden; [...] is any shape of tokens.
"""

from typing import TYPE_CHECKING, Any

import torch

from fastgrpo.kernels import head_torch
from fastgrpo.kernels.head_torch import Vocabulary
from fastgrpo.kernels.objectives import PolicyRows
from fastgrpo.loss import dispatch
from fastgrpo.loss.inputs import check_backward_tolerance, check_head, check_kept, check_temperature

if dispatch.HAS_TRITON:
    from fastgrpo.kernels import head as head_kernels
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_logprob(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, bias: torch.Tensor | None = None,
    logit_softcap: float | None = None, temperature: float | torch.Tensor = 1.0, return_entropy: bool = False,
    process_group: "ProcessGroup | None" = None, sum_hidden_grad: bool = True, backend: str = "auto",
    backward_tolerance: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute the log-probs of `targets` under softmax(softcap(hidden @ weight.T + bias) / temperature).

    The full logits are never in memory.

    Args:
        hidden: [..., D] floating point.
        weight: [V, D], the head.
        targets: [...] integers in [0, V).
        bias: [V] or None.
        logit_softcap: The cap of softcap(x) = cap tanh(x / cap), as in Gemma 2 (arXiv 2408.00118), or None.
        temperature: A float, or a tensor [...], at least 1e-30.
        return_entropy: Whether to return the entropy too, in nats.
        process_group: torch.distributed group. The rows of weight and bias are sharded over its ranks, in rank order,
            in equal or unequal parts. It is for other trainers; this package's trainer does not pass it. Targets are
            ids of the full vocabulary. All arguments except weight and bias are equal on all ranks, and so are the
            results. Every rank gets the full gradient of hidden, and its shard's gradient of weight and bias. Every
            rank must make the call and run its backward.
        sum_hidden_grad: Whether to sum the gradient of hidden over the ranks of process_group. If False, each rank
            gets the part of its shard, for callers that sum the parts themselves, as integrations/verl.py does. It has
            no effect without process_group.
        backend: "auto" (triton for bf16 on CUDA, else chunked), "chunked" or "triton".
        backward_tolerance: As in `linear_grpo_loss`; not with return_entropy.

    Returns:
        logps [...] fp32 (fp64 for fp64 inputs), differentiable by hidden, weight and bias. With `return_entropy`, the
        pair (logps, entropy), both differentiable.

    Raises:
        ValueError: A tensor has the wrong shape, device or dtype; a target is outside [0, V); a temperature is out of
            range; a rank has no rows of the weight; the backend is unknown; or backward_tolerance is out of range, or
            combined with return_entropy.
    """
    check_backward_tolerance(backward_tolerance, return_entropy=return_entropy)
    check_head(hidden, weight, bias, logit_softcap, targets)
    only_chunked = "backward_tolerance" if backward_tolerance else ""
    hidden, weight = dispatch.cast_for_autocast("chunked" if only_chunked else backend, hidden, weight)
    path = dispatch.choose_backend(backend, only_chunked, hidden=hidden, weight=weight)
    vocabulary = Vocabulary.of(weight, process_group)
    rows = PolicyRows(
        index=None, targets=targets.reshape(-1).long(), temperature=check_temperature(temperature, targets),
        advantages=None, weights=None, old_logps=None, ref_logps=None, lengths=None,
    )  # fmt: skip
    check_kept(rows, vocabulary.total)

    def kernel(states, rows, weight, bias):
        located, group = vocabulary.located(rows.targets, len(weight))
        logps, entropy = head_kernels.linear_logprob(
            states, weight, located, bias=bias, temperature=rows.temperature, softcap=logit_softcap,
            return_entropy=return_entropy, group=group, sum_hidden_grad=sum_hidden_grad,
        )  # fmt: skip
        return None, {"logps": logps, "entropy": entropy}

    def plain(states, rows, weight, bias):
        logps, entropy = head_torch.LinearLogprob.apply(
            states, weight, bias, rows.targets, rows.temperature,
            head_torch.chunk_rows(vocabulary.largest, states.device), return_entropy, vocabulary, logit_softcap,
            sum_hidden_grad, backward_tolerance,
        )  # fmt: skip
        return None, {"logps": logps, "entropy": entropy}

    states, head = hidden.reshape(-1, hidden.shape[-1]), (weight, bias)
    compute, rows = dispatch.select(
        "linear_logprob", path, kernel, plain, states, rows, head, by_name=backend == "triton",
        check=process_group is None, entropy=return_entropy, softcap=bool(logit_softcap),
    )  # fmt: skip
    _, outputs = compute(states, rows, *head)
    logps = outputs["logps"].view(targets.shape)
    return (logps, outputs["entropy"].view(targets.shape)) if return_entropy else logps


def logit_scale(config: Any) -> float:
    """Return the factor of a transformers model's logits, before the soft-cap."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere; Muse Glimmer; Falcon-H1
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    scaling = getattr(config, "logits_scaling", None)  # Granite divides by it, and HyperCLOVA X multiplies
    return 1.0 if scaling is None else scaling if config.model_type == "hyperclovax" else 1 / scaling


def logit_softcap(config: Any) -> float | None:
    """Return the soft-cap of a transformers model's logits, or None."""
    names = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"  # Gemma; RecurrentGemma; xLSTM
    return next((cap for name in names if (cap := getattr(config, name, None))), None)
