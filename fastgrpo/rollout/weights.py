"""The policy's weights while completions are in flight: whole, at known addresses, and unchanged."""

from contextlib import ExitStack

from fastgrpo.policy.model import Policy
from fastgrpo.rollout.graph import Graphs


class HeldWeights:
    """Holds the whole weights of a policy as long as any request is in flight.

    Keys and values in flight are computed with one version of the weights, and graphs read them at their addresses.

    Args:
        policy: The policy.
        graphs: The graphs, which are cleared where the weights lie elsewhere than before.
    """

    def __init__(self, policy: Policy, graphs: Graphs) -> None:
        self.policy, self.graphs = policy, graphs
        self.gathered, self.addresses = ExitStack(), None
        self.parameters, self.version = [], 0

    def hold(self) -> None:
        """Gather the weights before requests start, and note their addresses and versions."""
        self.gathered.close()
        gathered = self.policy.gather(keep=self.graphs.enabled)
        addresses = [weight.data_ptr() for weight in self.gathered.enter_context(gathered)]
        if addresses != self.addresses:
            self.graphs.clear()
        self.addresses, self.parameters = addresses, self.policy.parameters()
        self.version = self._writes()

    def check(self) -> None:
        """Refuse weights that have changed since requests started.

        Raises:
            ValueError: They have.
        """
        if self._writes() != self.version:
            raise ValueError("the weights changed while requests were in flight; finish or abort them before an update")

    def _writes(self):
        """Count the writes to the policy's parameters, so that an update between two steps shows."""
        return sum(parameter._version for parameter in self.parameters)

    def release(self) -> None:
        """Release what was gathered."""
        self.gathered.close()
