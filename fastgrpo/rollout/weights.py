"""The policy's weights while completions are in flight: whole, at known addresses, unchanged, and packed on a CPU.

Shapes: N tokens, S of which logits are wanted, V vocabulary.
"""

from contextlib import ExitStack

import torch

from fastgrpo.policy.model import Context, Policy
from fastgrpo.rollout.graph import Graphs
from fastgrpo.rollout.packed import PackedWeights

PACKED_FROM = 16  # tokens of a completion: fewer decode steps take less time than the packing of the weights


class HeldWeights:
    """Holds the whole weights of a policy as long as any request is in flight.

    Keys and values in flight are computed with one version of the weights, and graphs read them at their addresses.
    """

    def __init__(self, policy: Policy, graphs: Graphs) -> None:
        self.policy, self.graphs = policy, graphs
        self.gathered, self.addresses = ExitStack(), None
        self.parameters, self.version = [], 0
        self.packed = PackedWeights(policy)

    def hold(self, longest: int) -> None:
        """Gather the weights before requests start, and note their addresses and versions.

        Weights that are held already and have not changed stay as they are.
        """
        if not self.parameters or self._writes() != self.version:
            self._gather()
        if longest >= PACKED_FROM:
            self.packed.pack()

    def _gather(self):
        self.release()
        gathered = self.policy.gather(keep=self.graphs.enabled)
        addresses = [weight.data_ptr() for weight in self.gathered.enter_context(gathered)]
        if addresses != self.addresses:
            self.graphs.clear()
        self.addresses, self.parameters = addresses, self.policy.parameters()
        self.version = self._writes()

    def check(self) -> None:
        """Refuse weights that have changed since requests started."""
        if self._writes() != self.version:
            raise ValueError("the weights changed while requests were in flight; finish or abort them before an update")

    def _writes(self):
        """Count the writes to the policy's parameters, so that an update between two steps shows."""
        return sum(parameter._version for parameter in self.parameters)

    def logits(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context: Context,
        rows: torch.Tensor | slice = slice(None),
    ) -> torch.Tensor:
        """Run packed tokens through layers and head, without gradients.

        Args:
            input_ids: [N] int64.
            position_ids: [N] int64, the position of each token in its own sequence.
            context: The attention.
            rows: Which tokens' logits are wanted, [S] int64 or a slice.

        Returns:
            [S, V] fp32 logits.
        """
        with self.packed.in_use() as product:
            states = self.policy.states(input_ids, position_ids, context)
            return self.policy.logits(states[rows], product)

    def release(self) -> None:
        """Release what was gathered and packed."""
        self.packed.free()
        self.parameters = []
        self.gathered.close()
