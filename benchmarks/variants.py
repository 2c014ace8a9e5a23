"""The GRPO loss over a language-model head: fastgrpo, full logits, and the bare products that any head needs.

Shapes: N tokens, V vocabulary, D hidden. Unless stated otherwise, a head is a function that takes a `Batch`, computes
the clipped GRPO loss, a mean over the active tokens, and returns the gradients of hidden [N, D] and weight [V, D].
"""

from collections.abc import Callable

import torch

from benchmarks.batches import OBJECTIVE, Batch
from fastgrpo import linear_grpo_loss
from fastgrpo.kernels import head_torch, reference
from fastgrpo.kernels.head_torch import Vocabulary
from fastgrpo.loss.dispatch import HAS_TRITON
from fastgrpo.loss.inputs import TokenInputs, keep_rows
from fastgrpo.loss.losses import GRPOLossOutput

Gradients = tuple[torch.Tensor, torch.Tensor]
Head = Callable[[Batch], Gradients]


def plain_loss(logps: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Compute the loss from log-probs [N] in plain PyTorch, for heads that return log-probs."""
    weights = batch.mask / batch.mask.sum()
    return reference.policy_loss(logps, batch.old_logps, None, batch.advantages, weights, OBJECTIVE)[0]


def gradients_of(loss: torch.Tensor, batch: Batch) -> Gradients:
    """Return the gradients of hidden states and weight."""
    return torch.autograd.grad(loss, (batch.hidden, batch.weight))


def _public_loss(batch: Batch, tolerance: float = 0.0) -> GRPOLossOutput:
    return linear_grpo_loss(
        batch.hidden, batch.weight, batch.targets, batch.advantages,
        mask=batch.mask, rows=batch.rows, old_logps=batch.old_logps, objective=OBJECTIVE,
        backward_tolerance=tolerance,
    )  # fmt: skip


def fastgrpo(batch: Batch) -> Gradients:
    """Call fastgrpo's public function, which computes only the active tokens."""
    return gradients_of(_public_loss(batch).loss, batch)


def fastgrpo_bounded(tolerance: float) -> Head:
    """Return `fastgrpo` with this `backward_tolerance`."""
    return lambda batch: gradients_of(_public_loss(batch, tolerance).loss, batch)


def kept_and_dropped(batch: Batch, tolerance: float) -> tuple[float, float]:
    """Return the metrics `head/kept_columns` and `head/dropped_mass` of a bounded backward."""
    metrics = _public_loss(batch, tolerance).metrics
    return float(metrics["head/kept_columns"]), float(metrics["head/dropped_mass"])


def fastgrpo_forward(batch: Batch) -> torch.Tensor:
    """Call fastgrpo's public function without gradients, which needs one product, and return the log-probs [N]."""
    with torch.no_grad():
        return _public_loss(batch).logps


def fastgrpo_chunks(chunk_rows: int) -> Head:
    """Return `fastgrpo` with another chunk size, which is not an argument of the public function."""

    def call(batch: Batch) -> Gradients:
        hidden, weight = batch.hidden, batch.weight
        inputs = TokenInputs(batch.targets, batch.advantages, batch.mask, rows=batch.rows, old_logps=batch.old_logps)
        kept = keep_rows(inputs, OBJECTIVE)
        if hidden.is_cuda and HAS_TRITON:
            from fastgrpo.kernels import head as head_kernels

            loss, _ = head_kernels.linear_grpo_loss(hidden, weight, None, kept, OBJECTIVE, chunk_rows=chunk_rows)
        else:
            needs, vocabulary = (True, True, False), Vocabulary.of(weight, None)
            loss, _ = head_torch.LinearGRPO.apply(
                hidden, weight, None, kept, OBJECTIVE, chunk_rows, needs, False, vocabulary, None, None
            )
        return gradients_of(loss, batch)

    return call


def _full_logits_loss(batch: Batch) -> torch.Tensor:
    logits = (batch.hidden @ batch.weight.T).float()
    logps = torch.log_softmax(logits, -1).gather(-1, batch.targets[:, None])[:, 0]
    return plain_loss(logps, batch)


def full_logits(batch: Batch) -> Gradients:
    """Compute logits [N, V] in the batch's dtype and cast them to fp32, as a training loop without a fused head."""
    return gradients_of(_full_logits_loss(batch), batch)


def full_logits_compiled(backend: str) -> Head:
    """Return `full_logits` under torch.compile, with the backend "inductor", or "aot_eager" without a compiler."""
    loss = torch.compile(_full_logits_loss, backend=backend, dynamic=False)
    return lambda batch: gradients_of(loss(batch), batch)


def one_product(batch: Batch) -> torch.Tensor:
    """Compute only the logits of the active tokens, a lower bound for the forward pass of a head."""
    with torch.no_grad():
        return batch.hidden[: len(batch.rows)] @ batch.weight.T


def bare_products(batch: Batch) -> Gradients:
    """Compute only the three products of forward and backward, in the dtype of the operands.

    Without loss, casts and chunks, this is a lower bound for a head with gradients.
    """
    with torch.no_grad():
        hidden = batch.hidden[: len(batch.rows)]
        logits = hidden @ batch.weight.T
        return logits @ batch.weight, logits.T @ hidden
