"""The whole copy of a sharded policy, which completions are drawn from.

It is a plain module without hooks, so that drawing sends nothing between the ranks. It holds weights only while its
`gather` is open, once a phase of rollouts. They are what a pass over the shards computes with, to the last bit.
"""

import copy

import torch

from fastgrpo.policy.lora import ADAPTER
from fastgrpo.policy.model import Policy


class Gathered:
    """Holds the weights of a whole copy while it is open.

    It is no generator, which Python would close whenever it finds that nobody needs it any more, as when an engine is
    dropped with requests in flight. Ranks find that at different moments. They would disagree then on whether the next
    phase must gather the weights.
    """

    def __init__(self, whole: "WholeCopy") -> None:
        self.whole = whole

    def __enter__(self) -> list[torch.Tensor]:
        if not self.whole.depth:
            self.whole.fill()
        self.whole.depth += 1
        return [parameter.detach() for parameter in self.whole.module.parameters()]

    def __exit__(self, *raised: object) -> None:
        self.whole.depth -= 1
        if not self.whole.depth and not self.whole.keep:
            self.whole.free()


class WholeCopy(Policy):
    """A whole copy of a policy that is about to be sharded. Adapters are not sharded, so it has the policy's own."""

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
        self.source: Policy | None = None  # the sharded policy, which the weights come from

    def parameters(self) -> list[torch.nn.Parameter]:
        """List the copy's parameters and the shards that they are made from. An update raises the shards' versions."""
        return [*super().parameters(), *self.source.parameters()]

    def gather(self, keep: bool = False) -> "Gathered":
        """Hold the whole weights while a context manager is open. All ranks must open it together.

        Where one is open already, this does nothing and sends nothing, so ranks need not agree on calls inside of it.
        """
        self.keep |= keep
        return Gathered(self)

    @torch.no_grad()
    def fill(self) -> None:
        """Gather the weights from the shards. All ranks must call it."""
        if not self.held:
            for parameter in self.own:
                parameter.data = parameter.new_empty(parameter.shape)
            self.held = True
        for name, weight in self.source.whole_parameters():
            self.module.get_parameter(name).copy_(weight)

    def free(self) -> None:
        """Free the weights. Their shapes stay, and reading one gives NaN."""
        for parameter in self.own:
            parameter.data = _nothing(parameter)
        self.held = False


def _nothing(like, dtype=None):
    """Make a tensor of the same shape that takes no memory: it is NaN everywhere."""
    return torch.full((), torch.nan, dtype=dtype or like.dtype, device=like.device).expand(like.shape)
