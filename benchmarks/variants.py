"""One GRPO step over a language-model head, computed by each implementation that is compared: ours and the peers.

Shapes: N rows (tokens), V vocabulary, D hidden, S sequences of equal length. Every head computes the clipped GRPO loss,
a mean over the masked-in tokens, and returns the gradients of hidden [N, D] and weight [V, D].
"""

import importlib.util
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from fastgrpo import Objective, linear_grpo_loss
from fastgrpo.kernels import chunked, products, reference
from fastgrpo.kernels.softmax import Vocabulary
from fastgrpo.loss.checks import HAS_TRITON
from fastgrpo.loss.rows import TokenInputs, keep_rows

LOGIT_STD = 7.0  # an entropy of 1.9 nats at V = 151936: nearer to a trained model than the 11 of unit logits
LOG_RATIOS = (-0.5, -0.05, 0.05, 0.5)  # clipped or not by a wide margin: rounding decides for no token
ROWS_AT_ONCE = 256  # rows of full logits where a batch is drawn and where the truth is computed
TRL_CHUNK_SIZE = 32768  # what its trainer passes
OBJECTIVE = Objective()


class Batch(NamedTuple):
    """hidden [N, D], weight [V, D]; targets, advantages (one value a sequence), old_logps, mask [N].

    rows: [M] on the host, where the mask is set. length: tokens of a sequence.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor
    old_logps: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    length: int

    def masked(self, share):
        """The same batch with a share of its rows active, spread evenly; 1 is all."""
        position = torch.arange(len(self.mask))
        mask = ((position + 1) * share).long() > (position * share).long()
        mask |= share >= 1
        return self._replace(mask=mask.to(self.mask.device), rows=mask.nonzero()[:, 0])


def make_batch(n, d, v, *, length, dtype, device):
    """Random hidden states and head with all rows active; the targets are drawn from the distribution they make."""
    torch.manual_seed(0)
    hidden = torch.randn(n, d, device=device).to(dtype)
    weight = (torch.randn(v, d, device=device) * (LOGIT_STD / d**0.5)).to(dtype)
    targets, logps = [], []
    for rows in hidden.split(ROWS_AT_ONCE):
        logp = torch.log_softmax(rows.float() @ weight.float().T, -1)
        targets.append((logp - torch.empty_like(logp).exponential_().log_()).argmax(-1))  # Gumbel-max
        logps.append(logp.gather(-1, targets[-1][:, None])[:, 0])
    log_ratios = torch.tensor(LOG_RATIOS, device=device)[torch.randint(len(LOG_RATIOS), (n,), device=device)]
    advantages = torch.randn(n // length, device=device).repeat_interleave(length)
    return Batch(
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(),
        targets=torch.cat(targets),
        advantages=advantages,
        old_logps=torch.cat(logps) - log_ratios,
        mask=torch.ones(n, dtype=torch.bool, device=device),
        rows=torch.arange(n),
        length=length,
    )


def plain_loss(logps, batch):
    """The loss over log-probs [N] in plain PyTorch, for the heads that stop at log-probs."""
    weights = batch.mask / batch.mask.sum()
    return reference.policy_loss(logps, batch.old_logps, None, batch.advantages, weights, OBJECTIVE)[0]


def gradients_of(loss, batch):
    return torch.autograd.grad(loss, (batch.hidden, batch.weight))


def fastgrpo(batch):
    """The public function; rows that are not active are never projected."""
    output = linear_grpo_loss(
        batch.hidden, batch.weight, batch.targets, batch.advantages,
        mask=batch.mask, rows=batch.rows, old_logps=batch.old_logps, objective=OBJECTIVE,
    )  # fmt: skip
    return gradients_of(output.loss, batch)


def fastgrpo_forward(batch):
    """-> log-probs [N]: one product."""
    with torch.no_grad():
        output = linear_grpo_loss(
            batch.hidden, batch.weight, batch.targets, batch.advantages,
            mask=batch.mask, rows=batch.rows, old_logps=batch.old_logps, objective=OBJECTIVE,
        )  # fmt: skip
    return output.logps


def fastgrpo_chunks(chunk_rows):
    """`fastgrpo` with another number of rows in a chunk, which is no argument of the public function."""

    def call(batch):
        hidden, weight = batch.hidden, batch.weight
        inputs = TokenInputs(batch.targets, batch.advantages, batch.mask, rows=batch.rows, old_logps=batch.old_logps)
        kept = keep_rows(inputs, OBJECTIVE)
        if hidden.is_cuda and HAS_TRITON:
            from fastgrpo.kernels import linear_grpo

            loss, _ = linear_grpo.linear_grpo_loss(hidden, weight, None, kept, OBJECTIVE, chunk_rows=chunk_rows)
        else:
            needs, vocabulary = (True, True, False), Vocabulary.of(weight, None)
            loss, _ = chunked.LinearGRPO.apply(
                hidden, weight, None, kept, OBJECTIVE, chunk_rows, needs, False, vocabulary, None
            )
        return gradients_of(loss, batch)

    return call


def _full_logits_loss(batch):
    logits = (batch.hidden @ batch.weight.T).float()
    logps = torch.log_softmax(logits, -1).gather(-1, batch.targets[:, None])[:, 0]
    return plain_loss(logps, batch)


def full_logits(batch):
    """What a training loop without a fused head does: logits [N, V] in the batch's dtype, the rest in fp32."""
    return gradients_of(_full_logits_loss(batch), batch)


def full_logits_compiled(backend):
    """The same under torch.compile; `backend` "inductor", or "aot_eager" where no compiler is to run."""
    loss = torch.compile(_full_logits_loss, backend=backend, dynamic=False)
    return lambda batch: gradients_of(loss(batch), batch)


def trl_head():
    """TRL's head as its trainer calls it, less the entropy, which is for the logs; the plain loss on top.

    Like the trainer, it compacts the rows where Triton runs, and scores all of them elsewhere.
    """
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction, _use_triton

    def trl(batch):
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


def liger_head(compiled):
    """Liger's fused head and loss: one sequence at a time, its default."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    head = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=compiled, loss_type="dapo")

    def liger(batch):
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


def cut_cross_entropy_head():
    """cut-cross-entropy's log-probs, rows that are not active left to its ignore_index; the plain loss on top."""
    from cut_cross_entropy import linear_cross_entropy

    if not torch.cuda.is_available():
        raise ImportError("its kernels need a GPU")

    def cce(batch):
        targets = batch.targets.masked_fill(~batch.mask, -100)
        logps = -linear_cross_entropy(batch.hidden, batch.weight, targets, reduction="none").float()
        return gradients_of(plain_loss(logps, batch), batch)

    return cce


PEERS = {"trl": "trl", "liger": "liger-kernel", "cut-cross-entropy": "cut-cross-entropy"}  # variant -> distribution


def peers(compiled=True):
    """(variant -> head, variant -> why it is missing) of the peers; `compiled`: let Liger call torch.compile."""
    makers = {"trl": trl_head, "liger": partial(liger_head, compiled), "cut-cross-entropy": cut_cross_entropy_head}
    heads, missing = {}, {}
    for name, make in makers.items():
        try:
            heads[name] = make()
        except ImportError as error:
            installed = importlib.util.find_spec(PEERS[name].replace("-", "_"))
            missing[name] = f"{'does not run here' if installed else 'not installed'}: {error}"
    return heads, missing


def versions():
    """Distribution -> version of the peers and of Triton, "missing" where it is not installed."""
    found = {}
    for name in ("triton", *PEERS.values()):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def one_product(batch):
    """The floor of a forward: the logits of the active rows alone."""
    with torch.no_grad():
        return batch.hidden[: len(batch.rows)] @ batch.weight.T


def bare_products(batch):
    """The floor of forward and backward: three unchunked products, fp32 out for dW, no cast, no loss."""
    with torch.no_grad():
        hidden = batch.hidden[: len(batch.rows)]
        logits = hidden @ batch.weight.T
        return logits @ batch.weight, products.mm_fp32(logits.T, hidden)


class Truth(NamedTuple):
    """logps [N] (0 where not active), hidden [N, D], weight [V, D]: log-probs and gradients in fp64."""

    logps: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor


def truth(batch):
    """The reference in fp64 with autograd, a few rows of full logits at a time."""
    hidden, weight = batch.hidden.detach().double(), batch.weight.detach().double().requires_grad_()
    result = Truth(hidden.new_zeros(len(hidden)), torch.zeros_like(hidden), torch.zeros_like(weight))
    for rows in batch.rows.to(hidden.device).split(ROWS_AT_ONCE):
        part = hidden[rows].requires_grad_()
        logps = reference.linear_logprob(part, weight, batch.targets[rows])
        weights = torch.full_like(logps, 1 / len(batch.rows))
        old, advantages = batch.old_logps[rows].double(), batch.advantages[rows].double()
        loss = reference.policy_loss(logps, old, None, advantages, weights, OBJECTIVE)[0]
        result.logps[rows] = logps.detach()
        dh, dw = torch.autograd.grad(loss, (part, weight))
        result.hidden[rows] = dh
        result.weight.add_(dw)
    return result


def relative_error(value, expected):
    """Norm of the difference over the norm of `expected`."""
    return ((value.double() - expected).norm() / expected.norm()).item()
