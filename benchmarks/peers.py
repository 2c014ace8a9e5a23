"""The GRPO loss over a language-model head by TRL, Liger and cut-cross-entropy (see variants.py)."""

import importlib.util
from functools import partial

import torch

from benchmarks.batches import TOKENS_AT_ONCE, Batch
from benchmarks.variants import Gradients, Head, gradients_of, plain_loss

TRL_CHUNK_SIZE = 32768  # as in TRL's trainer
FILTER, TILE = 2**-12, 128  # cut-cross-entropy's filter for bf16 and its tiles of tokens and of vocabulary
PEERS = {"trl": "trl", "liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}  # variant -> its module


def trl_head() -> Head:
    """Return TRL's head as called by its trainer, with the plain loss over its log-probs.

    The entropy, which the trainer computes for its logs, is omitted. Like the trainer, the head gathers the active
    tokens if it uses Triton, and otherwise scores all tokens.
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
    """Return Liger's fused head and loss, by default one sequence at a time; `compiled` with torch.compile."""
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
    """Return a head with cut-cross-entropy's log-probs, which ignores inactive tokens, and the plain loss over them."""
    from cut_cross_entropy import linear_cross_entropy

    if not torch.cuda.is_available():
        raise ImportError("its kernels need a GPU")

    def cce(batch: Batch) -> Gradients:
        targets = batch.targets.masked_fill(~batch.mask, -100)
        logps = -linear_cross_entropy(batch.hidden, batch.weight, targets, reduction="none").float()
        return gradients_of(plain_loss(logps, batch), batch)

    return cce


def filtered_gradients(batch: Batch) -> tuple[Gradients, float]:
    """Compute the gradients with cut-cross-entropy's filter in plain PyTorch, which is slower than its kernel.

    The kernel orders the vocabulary by mean logit, and skips a tile of 128 tokens and 128 entries if no entry of
    softmax - onehot reaches 2^-12. All tokens must be active. Also returns the share of computed tiles.
    """
    hidden, weight = batch.hidden.detach(), batch.weight.detach()
    order = (hidden.mean(0) @ weight.T).argsort(descending=True)
    weight, targets = weight[order], order.argsort()[batch.targets]
    parts = torch.arange(len(hidden)).split(TOKENS_AT_ONCE)
    logps = [(hidden[part] @ weight.T).log_softmax(-1).gather(-1, targets[part, None])[:, 0] for part in parts]
    logps = torch.cat(logps).requires_grad_()
    (g,) = torch.autograd.grad(plain_loss(logps, batch), logps)
    dh, dw, kept = torch.zeros_like(hidden), torch.zeros_like(weight), []
    for part in torch.arange(len(hidden)).split(TILE):
        dz = (hidden[part] @ weight.T).softmax(-1)
        dz.scatter_add_(-1, targets[part, None], -torch.ones(len(part), 1))
        blocks = torch.nn.functional.pad(dz.abs().amax(0), (0, -len(weight) % TILE)).unflatten(0, (-1, TILE))
        kept.append(blocks.amax(-1) >= FILTER)
        dz *= -g[part, None] * kept[-1].repeat_interleave(TILE)[: len(weight)]
        dh[part] = dz @ weight
        dw.addmm_(dz.T, hidden[part])
    return (dh, torch.zeros_like(dw).index_copy_(0, order, dw)), torch.cat(kept).float().mean().item()


def peers(compiled: bool = True) -> tuple[dict[str, Head], dict[str, str]]:
    """Return the heads of all peers that run on this machine, and the reason for each peer that does not run."""
    makers = {"trl": trl_head, "liger": partial(liger_head, compiled), "cut-cross-entropy": cut_cross_entropy_head}
    heads, missing = {}, {}
    for name, make in makers.items():
        try:
            heads[name] = make()
        except ImportError as error:
            installed = importlib.util.find_spec(PEERS[name])
            missing[name] = f"{'does not run here' if installed else 'not installed'}: {error}"
    return heads, missing
