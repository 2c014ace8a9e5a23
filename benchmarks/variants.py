"""The GRPO loss over a language-model head: by fastgrpo, by full logits, and the bare products that any head needs.

Shapes: N tokens, V vocabulary, D hidden. Unless it says otherwise, a head is a function that takes a `Batch`, computes
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
    """Compute the loss in plain PyTorch, for the heads that stop at log-probs.

    Args:
        logps: [N] log-probs of the targets.
        batch: What they were computed from.
    """
    weights = batch.mask / batch.mask.sum()
    return reference.policy_loss(logps, batch.old_logps, None, batch.advantages, weights, OBJECTIVE)[0]


def gradients_of(loss: torch.Tensor, batch: Batch) -> Gradients:
    """Return the gradients of hidden states and weight.

    Args:
        loss: A scalar that was computed from the batch.
        batch: The inputs of the head.
    """
    return torch.autograd.grad(loss, (batch.hidden, batch.weight))


def _public_loss(batch: Batch, tolerance: float = 0.0) -> GRPOLossOutput:
    return linear_grpo_loss(
        batch.hidden, batch.weight, batch.targets, batch.advantages,
        mask=batch.mask, rows=batch.rows, old_logps=batch.old_logps, objective=OBJECTIVE,
        backward_tolerance=tolerance,
    )  # fmt: skip


def fastgrpo(batch: Batch) -> Gradients:
    """Call fastgrpo's public function, which projects the active tokens alone.

    Args:
        batch: The inputs of the head.
    """
    return gradients_of(_public_loss(batch).loss, batch)


def fastgrpo_bounded(tolerance: float) -> Head:
    """Make `fastgrpo` with a bounded backward.

    Args:
        tolerance: The argument `backward_tolerance`, above 0.
    """
    return lambda batch: gradients_of(_public_loss(batch, tolerance).loss, batch)


def kept_and_dropped(batch: Batch, tolerance: float) -> tuple[float, float]:
    """Return the share of the columns that a bounded backward keeps, and the most mass that a row leaves out.

    Args:
        batch: The inputs of the head.
        tolerance: The argument `backward_tolerance`, above 0.

    Returns:
        Both as the metrics `head/kept_columns` and `head/dropped_mass` say them.
    """
    metrics = _public_loss(batch, tolerance).metrics
    return float(metrics["head/kept_columns"]), float(metrics["head/dropped_mass"])


def fastgrpo_forward(batch: Batch) -> torch.Tensor:
    """Call fastgrpo's public function without gradients, for which one product with the weight is enough.

    Args:
        batch: The inputs of the head.

    Returns:
        [N] log-probs of the targets.
    """
    with torch.no_grad():
        return _public_loss(batch).logps


def fastgrpo_chunks(chunk_rows: int) -> Head:
    """Make `fastgrpo` with chunks of another size, which is no argument of the public function.

    Args:
        chunk_rows: Tokens whose logits are held at once.
    """

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
    """Do what a training loop without a fused head does: compute logits [N, V] in the batch's dtype, and then fp32.

    Args:
        batch: The inputs of the head.
    """
    return gradients_of(_full_logits_loss(batch), batch)


def full_logits_compiled(backend: str) -> Head:
    """Make `full_logits` under torch.compile.

    Args:
        backend: "inductor", or "aot_eager" where no compiler shall run.
    """
    loss = torch.compile(_full_logits_loss, backend=backend, dynamic=False)
    return lambda batch: gradients_of(loss(batch), batch)


def one_product(batch: Batch) -> torch.Tensor:
    """Compute nothing but the logits of the active tokens. No forward pass of a head can be faster.

    Args:
        batch: The inputs of the head.
    """
    with torch.no_grad():
        return batch.hidden[: len(batch.rows)] @ batch.weight.T


def bare_products(batch: Batch) -> Gradients:
    """Compute nothing but the three products that a forward and a backward pass need, in the dtype of the operands.

    There is no loss, no cast and no chunk, so that no head with gradients can be faster.

    Args:
        batch: The inputs of the head.
    """
    with torch.no_grad():
        hidden = batch.hidden[: len(batch.rows)]
        logits = hidden @ batch.weight.T
        return logits @ batch.weight, logits.T @ hidden
