"""The policy's weights while completions are in flight: whole, at known addresses, unchanged, and packed on a CPU.

The product that torch takes on a CPU brings the weight into an order of its own at each call. With the few rows of a
decode step, this costs much of the product's time. A rollout multiplies hundreds of times with the same weights, so
`PackedWeights` brings them into oneDNN's order once.

Shapes: N tokens, S of which logits are wanted, D inputs and F outputs of a layer, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from fastgrpo.policy.model import Context, Policy
from fastgrpo.rollout.graph import Graphs

PACKED_FROM = 16  # tokens of a completion: fewer decode steps take less time than the packing of the weights

OPS = "_reorder_linear_weight", "_linear_pointwise"  # torch.compile's own way to oneDNN
FEW_ROWS = 32  # for products of about so many rows oneDNN chooses the order


def packable(policy: Policy) -> bool:
    """Tell whether oneDNN has products for the weights of a policy."""
    mkldnn = torch.backends.mkldnn
    if policy.device.type != "cpu" or not (mkldnn.is_available() and mkldnn.enabled):
        return False
    ops = torch.ops.mkldnn
    if not all(hasattr(ops, name) for name in OPS):
        return False
    return policy.dtype == torch.float32 or (policy.dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())


class PackedWeights:
    """Copies of the weights of a policy's linear layers, which take memory of their own until they are freed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.forwards, self.head = [], None  # layers, and what computes them meanwhile; the head's packed weight

    @torch.inference_mode()
    def pack(self) -> None:
        """Copy the weights, if they are not copied yet and oneDNN has products for them."""
        if self.head is not None or not packable(self.policy):
            return
        dtype, head = self.policy.dtype, self.policy.module.get_output_embeddings()
        for layer in self.policy.module.modules():
            # The forward function of a layer may have been replaced already, as offloading does it.
            linear = type(layer) is torch.nn.Linear and layer is not head and layer.weight.dtype == dtype
            if linear and "forward" not in vars(layer):
                self.forwards.append((layer, partial(_linear, packed=_packed(layer.weight), bias=layer.bias)))
        self.head = _packed(head.weight.float())  # log-probs want fp32 logits

    def free(self) -> None:
        """Forget the copies."""
        self.forwards, self.head = [], None

    @contextmanager
    def in_use(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None]:
        """Let the layers compute with the copies, in inference mode only: these products have no gradient."""
        try:
            for layer, forward in self.forwards:
                vars(layer)["forward"] = forward
            yield None if self.head is None else self._head_product
        finally:
            for layer, _ in self.forwards:
                vars(layer).pop("forward", None)  # an interrupt may have come before all were replaced

    def _head_product(self, states, weight):
        """Compute states [N, D] @ weight.T [D, V] in fp32, from the copy."""
        return _linear(states.float(), self.head, None)


def _packed(weight):
    """Bring a weight [F, D] into oneDNN's order."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW_ROWS)


def _linear(states, packed, bias):
    """Compute states [..., D] @ weight.T + bias."""
    return torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")


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
        """Run packed tokens [N] through layers and head, without gradients; returns fp32 logits [S, V] of `rows`."""
        with self.packed.in_use() as product:
            states = self.policy.states(input_ids, position_ids, context)
            return self.policy.logits(states[rows], product)

    def release(self) -> None:
        """Release what was gathered and packed."""
        self.packed.free()
        self.parameters = []
        self.gathered.close()
