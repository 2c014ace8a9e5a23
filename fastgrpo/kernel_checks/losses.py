"""The trials of the kernels of the losses: inputs, the call, the same in plain PyTorch, and the judgement.

Shapes: N tokens, V vocabulary, D hidden.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fastgrpo.kernel_checks import heads
from fastgrpo.kernel_checks.heads import FACTORS, SLACK, Head
from fastgrpo.kernel_checks.places import Place, Trial
from fastgrpo.kernels import objectives, reference
from fastgrpo.kernels.head_torch import Vocabulary
from fastgrpo.loss import Objective
from fastgrpo.loss.checks import HAS_TRITON
from fastgrpo.loss.logprobs import linear_logprob
from fastgrpo.loss.losses import linear_grpo_loss, logits_grpo_loss

if HAS_TRITON:
    from fastgrpo.kernels import head as head_kernels
    from fastgrpo.kernels import logits as logits_kernels

Tensor = torch.Tensor
DAPO = Objective(beta=0.1)
# N, D and V for each mode: of the values, and of the time.
HEAD_SIZES = {
    "gpu": ((1024, 896, 32_003), (4096, 896, 151_936)),
    "cpu": ((64, 32, 500), (256, 64, 8192)),
    "interpreter": ((40, 16, 70), None),
}
SMALL_GPU = 40 * 2**30  # bytes: below them, time is taken with an eighth of the tokens, for the full logits' sake
SURROGATES = {
    "clip": Objective(beta=0.1),
    "clip with delta": Objective(delta=1.25, epsilon_high=0.1),
    "cispo": Objective("cispo", epsilon_high=1.2),
    "sapo": Objective("sapo"),
    "vespo": Objective("vespo", importance_sampling_mode="token_truncate"),
    "gspo": Objective(importance_sampling_level="sequence", beta=0.3, use_bias_correction_kl=True),
}
FLAGGED = 40.0  # standard deviation of the logits of every seventh token, whose target is the least likely one


def head_at(place: Place, flagged: bool = False, **options: Any) -> Head | None:
    """Draw a head of the place's size."""
    size = place.size(HEAD_SIZES)
    if size is None:
        return None
    n, d, v = size
    if place.timed and place.mode == "gpu" and torch.cuda.get_device_properties(0).total_memory < SMALL_GPU:
        n //= 8
    head = heads.random_head(n, d, v, place.dtype, device=place.device, scale=2.0, **options)
    if head.old_logps is None:  # at the size of the time, where values are not looked at
        head.old_logps = head.ref_logps = torch.full((n,), -12.0, device=place.device)
    if flagged:
        head.hidden[::7] *= FLAGGED / 2
        logits = head.hidden[::7].float() @ head.weight.float().T
        head.targets[::7] = logits.argmin(-1)
    return head


def plain_head(head: Head, scalar: heads.Scalar, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Compute loss and gradients as a loop without a fused head does: logits in the operands' dtype, then in fp32."""
    logits = torch.nn.functional.linear(leaves["hidden"], leaves["weight"], leaves.get("bias")).float()
    logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    logps, entropy = reference.logits_logprob(logits, head.targets, temperature=head.temperature, return_entropy=True)
    return torch.autograd.grad(scalar(logps, entropy), list(leaves.values()))


def products_of(head: Head) -> int:
    """Return the operations of the three products that a head with gradients needs."""
    return 6 * head.hidden.numel() * len(head.weight)


def fused_loss(
    place: Place, *, chunks: int = 1, bonus: bool = False, sharded: bool = False,
    objective: Objective = DAPO, **options: Any,
) -> Trial | None:  # fmt: skip
    """Make the trial of the fused loss."""
    head = head_at(place, **options)
    if head is None:
        return None
    fields = {"entropy_weights": 0.3 * head.weights} if bonus else {}
    leaves, rows = head.leaves(), head.rows(objective, **fields)
    scalar = heads.policy_scalar(rows, objective)
    targets, group = located(head) if sharded else (head.targets, None)
    options = {"chunk_rows": -(-len(head.targets) // chunks), "softcap": head.softcap, "group": group}

    def ours() -> dict[str, Tensor]:
        if place.mode == "cpu":
            out = linear_grpo_loss(
                leaves["hidden"], leaves["weight"], head.targets, head.advantages, token_weights=head.weights,
                old_logps=head.old_logps, ref_logps=head.ref_logps, bias=leaves.get("bias"), backend="chunked",
                logit_softcap=head.softcap, temperature=head.temperature, objective=objective,
            )  # fmt: skip
            loss, logps = out.loss, out.logps
        else:
            loss, outputs = head_kernels.linear_grpo_loss(
                leaves["hidden"], leaves["weight"], leaves.get("bias"), rows._replace(targets=targets), objective,
                **options,
            )  # fmt: skip
            logps = outputs["logps"]
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return {"loss": loss, "logps": logps, **dict(zip(leaves, gradients, strict=True))}

    return Trial(
        ours, partial(plain_head, head, scalar, leaves), partial(heads.judge, head=head, scalar=scalar),
        flops=products_of(head),
    )  # fmt: skip


def logprob(place: Place, *, entropy: bool = True, **options: Any) -> Trial | None:
    """Make the trial of the log-probs."""
    head = head_at(place, **options)
    if head is None:
        return None
    leaves = head.leaves()
    keywords = {"bias": leaves.get("bias"), "temperature": head.temperature, "return_entropy": entropy}

    def scalar(logps: Tensor, entropies: Tensor) -> Tensor:
        loss = (logps * head.grad_logps.to(logps.dtype)).sum()
        return loss + (entropies * head.grad_entropy.to(logps.dtype)).sum() if entropy else loss

    def ours() -> dict[str, Tensor]:
        operands = (leaves["hidden"], leaves["weight"], head.targets)
        if place.mode == "cpu":
            found = linear_logprob(*operands, logit_softcap=head.softcap, backend="chunked", **keywords)
            logps, entropies = found if entropy else (found, None)
        else:
            logps, entropies = head_kernels.linear_logprob(*operands, softcap=head.softcap, **keywords)
        gradients = torch.autograd.grad(scalar(logps, entropies), list(leaves.values()))
        found = {"logps": logps, **({"entropy": entropies} if entropy else {})}
        return {**found, **dict(zip(leaves, gradients, strict=True))}

    return Trial(
        ours, partial(plain_head, head, scalar, leaves), partial(heads.judge, head=head, scalar=scalar),
        flops=products_of(head),
    )  # fmt: skip


def logits_loss(place: Place, *, inplace: bool = False) -> Trial | None:
    """Make the trial of the loss of given logits."""
    head = head_at(place)
    if head is None:
        return None
    logits = torch.nn.functional.linear(head.hidden, head.weight).requires_grad_()
    rows = head.rows(DAPO)
    scalar = heads.policy_scalar(rows, DAPO)

    def found(leaf: Tensor, loss: Tensor, logps: Tensor) -> dict[str, Tensor]:
        return {"loss": loss, "logps": logps, "logits": torch.autograd.grad(loss, leaf)[0]}

    def exactly(dtype: torch.dtype) -> dict[str, Tensor]:
        leaf = logits.detach().to(dtype).requires_grad_()
        logps, entropy = reference.logits_logprob(leaf, head.targets, return_entropy=True)
        return found(leaf, scalar(logps, entropy), logps)

    def ours() -> dict[str, Tensor]:
        # Where only the time counts, the logits may be overwritten again and again.
        leaf = logits.detach().clone().requires_grad_() if inplace and not place.timed else logits
        if place.mode == "cpu":
            out = logits_grpo_loss(
                leaf, head.targets, head.advantages, token_weights=head.weights, old_logps=head.old_logps,
                ref_logps=head.ref_logps, backend="chunked", objective=DAPO, inplace=inplace,
            )  # fmt: skip
            return found(leaf, out.loss, out.logps)
        loss, outputs = logits_kernels.logits_grpo_loss(leaf, rows, DAPO, inplace=inplace)
        return found(leaf, loss, outputs["logps"])

    def judge(values: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
        true, simple = exactly(torch.float64), exactly(torch.float32)
        simple["logits"] = simple["logits"].to(place.dtype)
        return {
            name: (
                heads.error(name, value, true[name]),
                FACTORS[name] * heads.error(name, simple[name], true[name]) + SLACK,
            )
            for name, value in values.items()
        }

    # The logits are read twice and their gradient written once; in place they are read once.
    moved = (2 if inplace else 3) * logits.numel() * logits.element_size()
    return Trial(ours, partial(exactly, torch.float32), judge, bytes=moved)


def token_losses(place: Place) -> Trial | None:
    """Make the trial of the loss of given log-probs, with every surrogate."""
    if place.size(HEAD_SIZES) is None:
        return None
    head = heads.random_head(5000 if place.mode == "gpu" else 300, 8, 50, device=place.device)
    given = reference.linear_logprob(head.hidden, head.weight, head.targets)
    rows = {
        name: head.rows(objective, **({"sampler_logps": head.ref_logps} if name == "vespo" else {}))
        for name, objective in SURROGATES.items()
    }

    def exactly(dtype: torch.dtype) -> dict[str, Tensor]:
        found = {}
        for name, objective in SURROGATES.items():
            leaf = given.detach().to(dtype).requires_grad_()
            loss, _ = heads.policy_loss(leaf, rows[name], objective)
            found[name, "loss"], (found[name, "logits"],) = loss, torch.autograd.grad(loss, leaf)
        return found

    def ours() -> dict[str, Tensor]:
        found, forward = {}, (objectives if place.mode == "cpu" else logits_kernels).policy_loss_fwd
        for name, objective in SURROGATES.items():
            loss, found[name, "logits"], _ = forward(given, rows[name], objective)
            found[name, "loss"] = loss.sum()
        return found

    def judge(values: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
        true, simple = exactly(torch.float64), exactly(torch.float32)
        return {
            f"{name} {kind}": (
                heads.error(kind, value, true[name, kind]),
                FACTORS[kind] * heads.error(kind, simple[name, kind], true[name, kind]) + SLACK,
            )
            for (name, kind), value in values.items()
        }

    return Trial(ours, partial(exactly, torch.float32), judge)


def located(head: Head) -> tuple[Tensor, str]:
    """Return targets and group of a vocabulary that is sharded over this process alone."""
    if not dist.is_initialized():
        backend = "nccl" if head.weight.is_cuda else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Vocabulary.of(head.weight, dist.group.WORLD).located(head.targets, len(head.weight))
