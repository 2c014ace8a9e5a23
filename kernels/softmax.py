"""Logits of a chunk -> log-probs, entropy and gradient, in place, over a vocabulary held whole or sharded by rows.

Shapes: n rows, V vocabulary entries here (all of them, or this process's shard), D hidden.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

# Instead of a target's id within the shard: another rank has it, or nobody.
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

    Returns:
        `values`.
    """
    if group is not None:
        group = dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
        dist.all_reduce(values, op=op, group=group)
    return values


class Vocabulary(NamedTuple):
    """Which part of the vocabulary this process holds. Targets are global ids; per-row values are equal on all ranks.

    first: global id of the first entry here. total: entries over all ranks. largest: entries of the largest shard.
    group: the process group over which the shards lie, in rank order; None where the vocabulary is whole.
    """

    first: int
    total: int
    largest: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, weight, group):
        """weight: [V, D], the shard of this rank. The sizes are exchanged: one small collective and a host sync."""
        if group is None:
            return cls(0, weight.shape[0], weight.shape[0], None)
        size = torch.tensor([weight.shape[0]], device=weight.device)
        sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, size, group=group)
        sizes = torch.cat(sizes).tolist()
        if min(sizes) < 1:
            raise ValueError(f"weight must hold at least one row on every rank of process_group, got {sizes} rows")
        return cls(sum(sizes[: dist.get_rank(group)]), sum(sizes), max(sizes), group)

    def sum_(self, values):
        """Sum over the ranks, in place."""
        return all_reduce_(values, self.group)

    def max_(self, values):
        """Maximum over the ranks, in place."""
        return all_reduce_(values, self.group, dist.ReduceOp.MAX)

    def local(self, targets, size):
        """Global ids [n] -> (ids within the shard of `size` entries, whether this rank holds them)."""
        local = targets - self.first
        return local.clamp(0, size - 1), (local >= 0) & (local < size)

    def located(self, targets, size):
        """(targets, the group's name) for operators, which can be handed no group: ids within the shard of `size`
        entries, ELSEWHERE or NOWHERE; without a group, the targets themselves and None."""
        if self.group is None:
            return targets, None
        local, mine = self.local(targets, size)
        legal = (targets >= 0) & (targets < self.total)
        return torch.where(mine, local, torch.where(legal, ELSEWHERE, NOWHERE)), self.group.group_name


def softmax_(z, targets, vocabulary, return_entropy=False):
    """z [n, V] becomes softmax(z) in place; returns logps [n] and entropy [n] (or None).

    Sharded: all-reduce of the maxima, of the target logits (the owner's, 0 elsewhere) and sums together, and of the
    entropy sums.
    """
    z -= vocabulary.max_(z.amax(-1))[:, None]
    local, mine = vocabulary.local(targets, z.shape[-1])
    shifted_target = torch.where(mine, z.gather(-1, local[:, None])[:, 0], 0.0)
    total = z.exp_().sum(-1)
    shifted_target, total = vocabulary.sum_(torch.stack([shifted_target, total]))
    z /= total[:, None]
    # H = -sum_v p_v log p_v; entr is 0 at p = 0, so logits of -inf are legal
    entropy = vocabulary.sum_(torch.special.entr(z).sum(-1)) if return_entropy else None
    return shifted_target - total.log(), entropy


def logit_gradient_(probs, targets, vocabulary, g, entropy=None, h=None):
    """g dlogp/dz + h dH/dz, in place of the probabilities [n, V]; g, and entropy and h where there are, are [n].

    dlogp/dz = onehot_t - p,   dH/dz = -p (log p + H)
    """
    g = g.to(probs.dtype)
    if h is None:
        probs *= -g[:, None]
    else:
        slope = torch.special.entr(probs).mul_(h[:, None])
        probs.mul_(-(g + h * entropy)[:, None]).add_(slope)
    local, mine = vocabulary.local(targets, probs.shape[-1])
    return probs.scatter_add_(-1, local[:, None], torch.where(mine, g, 0.0)[:, None])
