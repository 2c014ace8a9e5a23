"""The whole copy of a sharded policy, which completions are drawn from.

It is a plain module without hooks, so that drawing sends nothing between the ranks. It holds weights only while its
`gather` is open, once a phase of rollouts. They are what a pass over the shards computes with, to the last bit.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from fastgrpo.policy.lora import ADAPTER
from fastgrpo.policy.model import Policy

if TYPE_CHECKING:
    from fastgrpo.policy.shard import ShardedPolicy


class WholeCopy(Policy):
    """A whole copy of a policy that is about to be sharded. Adapters are not sharded, so it has the policy's own.

    Args:
        policy: The whole policy.
        dtype: The dtype of the copy's weights.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        memo, self.own = {}, []  # the copy's own parameters
        for name, parameter in policy.module.named_parameters():
            memo[id(parameter)] = parameter
            if ADAPTER not in name:
                memo[id(parameter)] = torch.nn.Parameter(_nothing(parameter, dtype), requires_grad=False)
                self.own.append(memo[id(parameter)])
        # deepcopy takes the parameters from the memo
        super().__init__(copy.deepcopy(policy.module, memo), policy.own_attention, policy.grouped)
        self.depth, self.keep, self.held = 0, False, False
        self.source: ShardedPolicy | None = None  # where the weights come from

    def parameters(self) -> list[torch.Tensor]:
        """List the copy's parameters, and the shards that they are made from, whose versions an update raises."""
        return [*super().parameters(), *self.source.parameters()]

    @contextmanager
    def gather(self, keep: bool = False) -> Iterator[list[torch.Tensor]]:
        """Hold the whole weights while the context manager is open. All ranks must open it together.

        Where it is open already, it does nothing and sends nothing, so ranks need not agree on calls inside.

        Args:
            keep: Whether the weights must lie at the same addresses the next time, as CUDA graphs that read them need
                it. Their memory is then never freed. Otherwise it is freed at the end.

        Returns:
            A context manager that yields a view of every parameter, in the order of the module's parameters.
        """
        self.keep |= keep
        if not self.depth:
            self._fill()
        self.depth += 1
        try:
            yield [parameter.detach() for parameter in super().parameters()]
        finally:
            self.depth -= 1
            if not self.depth and not self.keep:
                self._free()

    @torch.no_grad()
    def _fill(self):
        if not self.held:
            for parameter in self.own:
                parameter.data = parameter.new_empty(parameter.shape)
            self.held = True
        for name, weight in self.source.whole_parameters():
            self.module.get_parameter(name).copy_(weight)

    def _free(self):
        for parameter in self.own:
            parameter.data = _nothing(parameter)
        self.held = False


def _nothing(like, dtype=None):
    """Make a tensor of the same shape that takes no memory: it is NaN everywhere."""
    return torch.full((), torch.nan, dtype=dtype or like.dtype, device=like.device).expand(like.shape)
