"""The GRPO loss over a language-model head, as TRL, Liger and cut-cross-entropy compute it (see variants.py)."""

import importlib.util
from functools import partial

import torch

from benchmarks.batches import Batch
from benchmarks.variants import Gradients, Head, gradients_of, plain_loss

TRL_CHUNK_SIZE = 32768  # what TRL's trainer passes
PEERS = {"trl": "trl", "liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}  # variant -> its module


def trl_head() -> Head:
    """Make TRL's head as its trainer calls it, with the plain loss over its log-probs.

    The entropy is left out; the trainer computes it for its logs. Like the trainer, the head gathers the active tokens
    where Triton runs, and scores all tokens elsewhere.

    Raises:
        ImportError: TRL is not installed.
    """
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction, _use_triton

    def trl(batch: Batch) -> Gradients:
        compact = _use_triton(batch.hidden.device)
        logps = ChunkedLogProbFunction.apply(
            batch.hidden[batch.mask] if compact else batch.hidden,
            batch.weight,
            None,
            batch.targets[batch.mask] if compact else batch.targets,
            1.0,
            TRL_CHUNK_SIZE,
            None,
            1.0,
            ("log_probs",),
        )[0]
        if compact:
            logps = logps.new_zeros(batch.mask.shape).masked_scatter(batch.mask, logps)
        else:
            logps = logps.masked_fill(~batch.mask, 0)
        return gradients_of(plain_loss(logps, batch), batch)

    return trl


def liger_head(compiled: bool) -> Head:
    """Make Liger's fused head and loss, which takes one sequence at a time, as it does by default.

    Args:
        compiled: Whether Liger calls torch.compile.

    Raises:
        ImportError: Liger is not installed.
    """
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    head = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=compiled, loss_type="dapo")

    def liger(batch: Batch) -> Gradients:
        padded = (-1, batch.length)
        loss = head(
            batch.hidden.view(*padded, batch.hidden.shape[-1]),
            batch.weight,
            batch.targets.view(padded),
            batch.mask.view(padded),
            batch.advantages.view(padded)[:, 0],
            old_per_token_logps=batch.old_logps.view(padded),
        )[0]
        return gradients_of(loss, batch)

    return liger


def cut_cross_entropy_head() -> Head:
    """Make a head of cut-cross-entropy's log-probs, with the plain loss over them.

    Tokens that are not active get the target that cut-cross-entropy ignores.

    Raises:
        ImportError: cut-cross-entropy is not installed, or there is no GPU for its kernels.
    """
    from cut_cross_entropy import linear_cross_entropy

    if not torch.cuda.is_available():
        raise ImportError("its kernels need a GPU")

    def cce(batch: Batch) -> Gradients:
        targets = batch.targets.masked_fill(~batch.mask, -100)
        logps = -linear_cross_entropy(batch.hidden, batch.weight, targets, reduction="none").float()
        return gradients_of(plain_loss(logps, batch), batch)

    return cce


def peers(compiled: bool = True) -> tuple[dict[str, Head], dict[str, str]]:
    """Make the heads of all peers that run here.

    Args:
        compiled: Whether Liger calls torch.compile.

    Returns:
        The heads by the peer's name, and the reason for each peer that does not run here.
    """
    makers = {"trl": trl_head, "liger": partial(liger_head, compiled), "cut-cross-entropy": cut_cross_entropy_head}
    heads, missing = {}, {}
    for name, make in makers.items():
        try:
            heads[name] = make()
        except ImportError as error:
            installed = importlib.util.find_spec(PEERS[name])
            missing[name] = f"{'does not run here' if installed else 'not installed'}: {error}"
    return heads, missing
