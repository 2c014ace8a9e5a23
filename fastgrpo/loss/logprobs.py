"""The public log-prob of a language-model head: hidden states -> log-probs and entropy, without logits in memory.

The formula stands in kernels/head.py (Triton) and kernels/head_torch.py (plain PyTorch); kernels/reference.py
has the plain function that both are held to.

Shapes: V vocabulary, D hidden; [...] is any shape of tokens.
"""

from typing import TYPE_CHECKING

import torch

from fastgrpo.kernels import head_torch
from fastgrpo.kernels.head_torch import Vocabulary
from fastgrpo.kernels.objectives import cut, needed
from fastgrpo.loss.checks import (
    HAS_TRITON,
    cast_for_autocast,
    check_backward_tolerance,
    check_head,
    choose_backend,
)
from fastgrpo.loss.rows import per_token
from fastgrpo.loss.values import check_targets, check_temperature, check_temperatures

if HAS_TRITON:
    from fastgrpo.kernels import head as head_kernels
    from fastgrpo.loss import self_check
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_logprob(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, bias: torch.Tensor | None = None,
    logit_softcap: float | None = None, temperature: float | torch.Tensor = 1.0, return_entropy: bool = False,
    process_group: "ProcessGroup | None" = None, sum_hidden_grad: bool = True, backend: str = "auto",
    backward_tolerance: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute the log-probs of `targets` under softmax(softcap(hidden @ weight.T + bias) / temperature).

    The logits are never in memory as a whole.

    Args:
        hidden: [..., D] floating point.
        weight: [V, D], the head.
        targets: [...] integers in [0, V).
        bias: [V] or None.
        logit_softcap: The cap of softcap(x) = cap tanh(x / cap), as in Gemma 2 (arXiv 2408.00118), or None.
        temperature: A float, or a tensor [...], at least 1e-30.
        return_entropy: Whether to return the entropy too, in nats.
        process_group: Group of torch.distributed over whose ranks the rows of weight and bias are sharded, in rank
            order, in equal or unequal parts. It is there for trainers of your own; the engine here does not pass it.
            Targets stay ids of the whole vocabulary. All arguments but weight and bias are the same on every rank, and
            so are the results. The gradient of hidden comes back whole on every rank, those of weight and bias for the
            shard. Every rank must make the call, and run its backward.
        sum_hidden_grad: Whether the gradient of hidden is summed over the ranks of process_group. False leaves on each
            rank the part that comes from its shard, for callers that sum the parts themselves, as
            integrations/verl.py does. Without process_group there is one part.
        backend: "auto" (triton for bf16 on CUDA, else chunked), "chunked" or "triton".
        backward_tolerance: As in `linear_grpo_loss`; not with return_entropy.

    Returns:
        logps [...] fp32 (fp64 for fp64 inputs), differentiable by hidden, weight and bias. With `return_entropy` the
        pair (logps, entropy), both differentiable.

    Raises:
        ValueError: A tensor has the wrong shape, device or kind of numbers; a target lies outside [0, V) or a
            temperature outside of its range; a rank holds no rows of the weight; the backend is unknown; or
            backward_tolerance is out of range, or given with return_entropy.
    """
    check_backward_tolerance(backward_tolerance)
    if backward_tolerance and return_entropy:
        raise ValueError(
            f"backward_tolerance={backward_tolerance} bounds the gradient of log-probs, and the entropy has a gradient "
            "of its own on every column of the vocabulary; pass backward_tolerance=0, or return_entropy=False"
        )
    check_head(hidden, weight, bias, logit_softcap, targets)
    check_temperature(temperature, targets)
    alone = ["backward_tolerance"] if backward_tolerance else []
    hidden, weight = cast_for_autocast("chunked" if alone else backend, hidden, weight)
    asked, backend = backend, choose_backend(backend, alone, hidden=hidden, weight=weight)
    vocabulary = Vocabulary.of(weight, process_group)
    flat = targets.reshape(-1).long()
    check_targets(flat, vocabulary.total)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    temperature = per_token(temperature, "temperature", targets.shape)
    if isinstance(temperature, torch.Tensor):
        check_temperatures(temperature)

    def fused(states, weight, bias, part=slice(None)):
        located, group = vocabulary.located(flat[part], len(weight))
        return head_kernels.linear_logprob(
            states, weight, located, bias=bias, temperature=cut(temperature, part), softcap=logit_softcap,
            return_entropy=return_entropy, group=group, sum_hidden_grad=sum_hidden_grad,
        )  # fmt: skip

    def plain(states, weight, bias, part=slice(None)):
        return head_torch.LinearLogprob.apply(
            states, weight, bias, flat[part], cut(temperature, part), head_torch.chunk_rows(vocabulary.largest),
            return_entropy, vocabulary, logit_softcap, sum_hidden_grad, backward_tolerance,
        )  # fmt: skip

    # Ranks that share a vocabulary would have to fail together, so each takes the kernel as it is.
    if backend == "triton" and process_group is None and len(flat) and not torch.compiler.is_compiling():
        variant = {
            "dtype": hidden.dtype, "aligned": hidden.data_ptr() % 16 == 0, "entropy": return_entropy,
            "head": tuple(weight.shape), "bias": bias is not None, "soft-cap": logit_softcap is not None,
            "gradient": any(needed(hidden, weight, bias)), "temperatures": isinstance(temperature, torch.Tensor),
        }  # fmt: skip

        def compare():
            part, sample = slice(0, self_check.ROWS), hidden[: self_check.ROWS].detach()
            ways = (_summed(way, weight, bias, part) for way in (fused, plain))
            return self_check.difference(*ways, sample, variant["gradient"])

        remedy = self_check.ANY_BACKEND if asked == "triton" else None
        if not self_check.trusted("linear_logprob", hidden.device, variant, compare, remedy):
            backend = "chunked"
    logps, entropy = (fused if backend == "triton" else plain)(hidden, weight, bias)
    logps = logps.view(targets.shape)
    return (logps, entropy.view(targets.shape)) if return_entropy else logps


def _summed(way, weight, bias, part):
    """Return a function of the states of some rows: the sum of log-probs and entropies, and both by name."""
    frozen = weight.detach(), None if bias is None else bias.detach()

    def run(states):
        logps, entropy = way(states, *frozen, part)
        return logps.sum() + (0 if entropy is None else entropy.sum()), {"logps": logps, "entropy": entropy}

    return run
