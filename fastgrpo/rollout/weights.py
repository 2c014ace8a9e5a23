"""The policy's weights while completions are in flight: gathered, at fixed addresses, unchanged, and packed on a CPU.

On a CPU, torch's matrix product reorders the weight in each call, which takes much of the time for the few rows of a
decode step. A rollout multiplies hundreds of times with the same weights, so `PackedWeights` converts them to oneDNN's
memory order once.

Shapes: N tokens, S rows of logits, D inputs and F outputs of a layer, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from fastgrpo.policy.model import Context, Policy
from fastgrpo.rollout.graph import Graphs

PACKED_FROM = 16  # minimum tokens of a completion: fewer decode steps take less time than packing the weights

OPS = "_reorder_linear_weight", "_linear_pointwise"  # the operators that torch.compile uses for oneDNN
FEW_ROWS = 32  # oneDNN chooses the memory order for products of about this many rows


def packable(policy: Policy) -> bool:
    """Return whether oneDNN supports packed products for the weights of a policy."""
    mkldnn = torch.backends.mkldnn
    if policy.device.type != "cpu" or not (mkldnn.is_available() and mkldnn.enabled):
        return False
    ops = torch.ops.mkldnn
    if not all(hasattr(ops, name) for name in OPS):
        return False
    return policy.dtype == torch.float32 or (policy.dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())


class PackedWeights:
    """Packed copies of the weights of a policy's linear layers. They take memory until they are freed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.forwards, self.head = [], None  # pairs of layer and replacement forward; the head's packed weight

    @torch.inference_mode()
    def pack(self) -> None:
        """Copy the weights, unless they are already copied or oneDNN does not support them."""
        if self.head is not None or not packable(self.policy):
            return
        dtype, head = self.policy.dtype, self.policy.module.get_output_embeddings()
        for layer in self.policy.module.modules():
            # Skip layers whose forward is already replaced, as offloading does.
            linear = type(layer) is torch.nn.Linear and layer is not head and layer.weight.dtype == dtype
            if linear and "forward" not in vars(layer):
                self.forwards.append((layer, partial(_linear, packed=_packed(layer.weight), bias=layer.bias)))
        self.head = _packed(head.weight.float())  # log-probs need fp32 logits

    def free(self) -> None:
        """Free the copies."""
        self.forwards, self.head = [], None

    @contextmanager
    def in_use(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None]:
        """Run the layers with the copies. Only for inference mode: these products have no gradient."""
        try:
            for layer, forward in self.forwards:
                vars(layer)["forward"] = forward
            yield None if self.head is None else self._head_product
        finally:
            for layer, _ in self.forwards:
                vars(layer).pop("forward", None)  # an interrupt may leave some layers unreplaced

    def _head_product(self, states, weight):
        """Compute states [N, D] @ weight.T [D, V] in fp32 with the copy."""
        return _linear(states.float(), self.head, None)


def _packed(weight):
    """Convert a weight [F, D] to oneDNN's memory order."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW_ROWS)


def _linear(states, packed, bias):
    """Compute states [..., D] @ weight.T + bias."""
    return torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")


class HeldWeights:
    """Keeps the weights of a policy gathered while requests are in flight.

    All keys and values in flight must come from one version of the weights. CUDA graphs read them at fixed addresses.
    """

    def __init__(self, policy: Policy, graphs: Graphs) -> None:
        self.policy, self.graphs = policy, graphs
        self.gathered, self.addresses = ExitStack(), None
        self.parameters, self.version = [], 0
        self.packed = PackedWeights(policy)

    def hold(self, longest: int) -> None:
        """Gather the weights before requests start, and record their addresses and versions.

        If they are already held and unchanged, they are not gathered again.
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
        """Raise if the weights have changed since requests started."""
        if self._writes() != self.version:
            raise ValueError("the weights changed while requests were in flight; finish or abort them before an update")

    def _writes(self):
        """Return the number of in-place writes to the policy's parameters, to detect an update."""
        return sum(parameter._version for parameter in self.parameters)

    def logits(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context: Context,
        rows: torch.Tensor | slice = slice(None),
    ) -> torch.Tensor:
        """Run packed tokens [N] through layers and head without gradients, and return fp32 logits [S, V] of `rows`."""
        with self.packed.in_use() as product:
            states = self.policy.states(input_ids, position_ids, context)
            return self.policy.logits(states[rows], product)

    def release(self) -> None:
        """Release the gathered and packed weights."""
        self.packed.free()
        self.parameters = []
        self.gathered.close()
