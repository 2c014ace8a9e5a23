"""Logits of a chunk -> log-probs, entropy and gradient, in place, over a vocabulary that is whole or sharded.

Shapes: n rows of the chunk (one a token), V vocabulary entries here (all of them, or this process's shard), D hidden.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

# These stand for a target's id within the shard where another rank holds the target, and where no rank does.
ELSEWHERE, NOWHERE = -1, -2


def all_reduce_(
    values: torch.Tensor, group: dist.ProcessGroup | str | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduce `values` in place over the ranks of a process group.

    Args:
        values: A tensor of the same shape on every rank.
        group: The process group, or its name where an operator of torch.library cannot be handed the group itself.
            None means that there is one process: nothing happens.
        op: The reduction.
    """
    if group is not None:
        group = dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
        dist.all_reduce(values, op=op, group=group)
    return values


class Vocabulary(NamedTuple):
    """The part of the vocabulary that this process holds.

    Targets are ids of the whole vocabulary, and values for each row are equal on all ranks.

    Attributes:
        first: Id of the first entry here.
        total: Entries over all ranks.
        largest: Entries of the largest shard.
        group: The process group over which the shards lie, in rank order. None where this process holds all entries.
    """

    first: int
    total: int
    largest: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, weight: torch.Tensor, group: dist.ProcessGroup | None) -> "Vocabulary":
        """Find the part that a rank holds. The ranks exchange the sizes of their shards, and the host waits for them.

        Args:
            weight: [V, D], the shard of this rank.
            group: The process group, or None.
        """
        if group is None:
            if not weight.shape[0]:
                raise ValueError("weight must hold at least one row, got none")
            return cls(0, weight.shape[0], weight.shape[0], None)
        size = torch.tensor([weight.shape[0]], device=weight.device)
        sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, size, group=group)
        sizes = torch.cat(sizes).tolist()
        if min(sizes) < 1:
            raise ValueError(f"weight must hold at least one row on every rank of process_group, got {sizes} rows")
        return cls(sum(sizes[: dist.get_rank(group)]), sum(sizes), max(sizes), group)

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place.

        Args:
            values: A tensor of the same shape on every rank.
        """
        return all_reduce_(values, self.group)

    def max_(self, values: torch.Tensor) -> torch.Tensor:
        """Take the maximum over the ranks, in place.

        Args:
            values: A tensor of the same shape on every rank.
        """
        return all_reduce_(values, self.group, dist.ReduceOp.MAX)

    def local(self, targets: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn ids of the whole vocabulary into ids within this shard.

        Args:
            targets: [n] int64 ids of the whole.
            size: Entries of this shard.

        Returns:
            Ids within the shard [n] int64 (clamped to it), and whether this rank holds them [n] bool.
        """
        local = targets - self.first
        return local.clamp(0, size - 1), (local >= 0) & (local < size)

    def located(self, targets: torch.Tensor, size: int) -> tuple[torch.Tensor, str | None]:
        """Translate targets and group for operators of torch.library, which cannot be handed a group.

        Args:
            targets: [n] int64 ids of the whole.
            size: Entries of this shard.
        """
        if self.group is None:
            return targets, None
        local, mine = self.local(targets, size)
        legal = (targets >= 0) & (targets < self.total)
        return torch.where(mine, local, torch.where(legal, ELSEWHERE, NOWHERE)), self.group.group_name


def softmax_(
    z: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, return_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn logits into their softmax in place, and compute log-probs and entropy.

        logp = z_t - log sum_v e^z_v,   H = -sum_v p_v log p_v

    A sharded vocabulary all-reduces the maxima, then the logits of the targets (the owner's, 0 elsewhere) together with
    the sums, then the sums of the entropy.

    Args:
        z: [n, V] logits divided by the temperature. They become the probabilities.
        targets: [n] int64 ids of the whole vocabulary.
        vocabulary: Which part of it `z` covers.
        return_entropy: Whether to compute the entropy too.

    Returns:
        logps [n], and entropy [n] in nats or None.
    """
    top = vocabulary.max_(z.amax(-1))
    local, mine = vocabulary.local(targets, z.shape[-1])
    shifted_target = torch.where(mine, z.gather(-1, local[:, None])[:, 0] - top, 0.0)
    if z.is_cpu and vocabulary.group is None:
        # One pass over each row while it is in the cache. The largest probability is e^0 over the sum.
        torch.softmax(z, -1, out=z)
        log_total = -z.amax(-1).log()
    else:
        z -= top[:, None]
        shifted_target, total = vocabulary.sum_(torch.stack([shifted_target, z.exp_().sum(-1)]))
        z /= total[:, None]
        log_total = total.log()
    # H = -sum_v p_v log p_v; entr is 0 at p = 0, so logits of -inf are legal
    entropy = vocabulary.sum_(torch.special.entr(z).sum(-1)) if return_entropy else None
    return shifted_target - log_total, entropy


def logit_gradient_(
    probs: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, g: torch.Tensor,
    entropy: torch.Tensor | None = None, h: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Turn probabilities into the gradient by the logits, in place.

        dz = g dlogp/dz + h dH/dz,   dlogp/dz = onehot_t - p,   dH/dz = -p (log p + H)

    Args:
        probs: [n, V] probabilities. They become dz.
        targets: [n] int64 ids of the whole vocabulary.
        vocabulary: Which part of it `probs` covers.
        g: [n] gradient of the log-prob.
        entropy: [n] entropy H in nats, needed with `h`.
        h: [n] gradient of the entropy, or None.
    """
    g = g.to(probs.dtype)
    if h is None:
        probs *= -g[:, None]
    else:  # -p (g + h H) + h (-p log p), without log p where p is 0
        slope = torch.special.entr(probs).mul_(h[:, None])
        probs.mul_(-(g + h * entropy)[:, None]).add_(slope)
    local, mine = vocabulary.local(targets, probs.shape[-1])
    return probs.scatter_add_(-1, local[:, None], torch.where(mine, g, 0.0)[:, None])
