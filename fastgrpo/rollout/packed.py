"""The weights of linear layers in the order in which oneDNN multiplies, while completions are drawn on a CPU.

The product that torch takes on a CPU brings the weight into an order of its own at each call. With the few rows of a
decode step, this costs much of the product's time. A rollout multiplies hundreds of times with the same weights, so it
brings them into oneDNN's order once.

Shapes: N tokens, D inputs and F outputs of a layer, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from fastgrpo.policy.model import Policy

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
