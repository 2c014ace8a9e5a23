"""The policy's weights while completions are in flight: gathered, at fixed addresses, unchanged, and packed on a CPU.

On a CPU, torch's matrix product reorders the weight in each call, which takes much of the time for the few rows of a
decode step. A rollout multiplies hundreds of times with the same weights, so `PackedWeights` converts them to oneDNN's
memory order once.

Adapters are merged into copies, W + alpha / r B A in fp32, rounded once. 4-bit weights are dequantized into copies. The
weights of the policy are never written.

Shapes: N tokens, S rows of logits, D inputs and F outputs of a layer, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial

import torch

from fastgrpo.loss.dispatch import HAS_TRITON, trusted
from fastgrpo.policy.lora import adapter_of, base_layer, dense_weight, merged_weight
from fastgrpo.policy.model import Context, Policy
from fastgrpo.policy.quantized import NF4Linear
from fastgrpo.rollout.attention import DecodeAttention
from fastgrpo.rollout.graph import Graphs
from fastgrpo.rollout.layers import LINEAR, Joined, Layers, groups, obstacle
from fastgrpo.rollout.mapped import Mapped

if HAS_TRITON:
    from fastgrpo.kernels import launch

logger = logging.getLogger(__name__)
PACKED_FROM = 16  # minimum tokens of a completion: fewer decode steps take less time than packing the weights

OPS = "_reorder_linear_weight", "_linear_pointwise"  # the operators that torch.compile uses for oneDNN
FEW_ROWS = 32  # oneDNN chooses the memory order for products of about this many rows
MERGED_SHARE = 0.3  # maximum share of the free memory for copies, with merged adapters or of 4-bit weights


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
        self.known = obstacle(policy) is None
        self.free()

    @torch.inference_mode()
    def pack(self) -> None:
        """Copy the weights, unless they are already copied or oneDNN does not support them."""
        if self.head is not None or not packable(self.policy):
            return
        dtype, head = self.policy.dtype, self.policy.module.get_output_embeddings()
        if self.known:
            products = [self._joined(linears) for linears in groups(self.policy)]
            self.layers = Layers(self.policy, products, fused=False)
        for layer in () if self.known else self.policy.module.modules():
            # Skip layers whose forward is already replaced, as offloading does.
            linear = type(layer) in LINEAR and layer is not head and "forward" not in vars(layer)
            if linear and (weight := dense_weight(layer)).dtype == dtype:
                self.forwards.append((layer, partial(_linear, packed=_packed(weight), bias=layer.bias)))
        self.head = _packed(head.weight.float())  # log-probs need fp32 logits

    def _joined(self, linears):
        """Pack layers with the same input as one product, with merged adapters."""
        biases = [base_layer(linear).bias for linear in linears]
        packed = _packed(torch.cat([merged_weight(linear) for linear in linears]))
        return partial(_linear, packed=packed, bias=None if biases[0] is None else torch.cat(biases))

    def free(self) -> None:
        """Free the copies."""
        self.layers = self.head = None  # the layers with packed products, if they are known; the head's packed weight
        self.forwards = []  # pairs of layer and replacement forward, for other models

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

    All keys and values in flight must come from one version of the weights, which CUDA graphs read at fixed addresses.
    Copies of weights may take a share of the `free()` bytes, and `mapped` allocates them (None: torch).
    """

    def __init__(self, policy: Policy, graphs: Graphs, free: Callable[[], float], mapped: Mapped | None = None) -> None:
        self.policy, self.graphs, self.free, self.mapped = policy, graphs, free, mapped
        self.gathered, self.addresses = ExitStack(), None
        self.parameters, self.version = [], 0
        self.packed = PackedWeights(policy)
        self.fused, self.layers = uses_kernels(policy), None
        self.copies = None  # by number of the group: the weight with merged adapters, dequantized

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
        self.gathered.enter_context(self.policy.gather(keep=self.graphs.enabled))
        if self.fused:
            self._join()
        addresses = [weight.data_ptr() for weight in self.policy.module.parameters()]
        if addresses != self.addresses:
            self.graphs.clear()
        self.addresses, self.parameters = addresses, self.policy.parameters()
        self.version = self._writes()

    @torch.inference_mode(False)  # tensors of inference mode cannot be written outside it
    @torch.no_grad()
    def _join(self):
        """Make the products of the layers, with copies of the weights if they fit."""
        joined = groups(self.policy)
        if self.copies is None:
            sizes = copied_bytes(self.policy)
            fits = sum(sizes.values()) <= MERGED_SHARE * self.free()
            self.copies = dict.fromkeys(sizes if fits else ())
            if sizes:
                how = "merged" if fits else "apart, since copies of the weights do not fit"
                logger.info("rollouts compute the adapters %s (%.2f GiB)", how, sum(sizes.values()) / 2**30)
        for i, copy in self.copies.items():
            weights = [merged_weight(linear) for linear in joined[i]]
            if copy is None and self.mapped is not None:
                copy = self.mapped.empty((sum(map(len, weights)), weights[0].shape[1]), weights[0].dtype)
            self.copies[i] = torch.cat(weights, out=copy)
        products = [Joined(linears, self.copies.get(i)) for i, linears in enumerate(joined)]
        self.layers = Layers(self.policy, products, fused=True)

    def drop_copies(self) -> None:
        """Free the copies with merged adapters or dequantized weights, which `hold` makes again."""
        self.layers, self.copies = None, self.copies and dict.fromkeys(self.copies)

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
            return self.policy.logits(self.states(input_ids, position_ids, context)[rows], product)

    def states(self, input_ids: torch.Tensor, position_ids: torch.Tensor, context: Context) -> torch.Tensor:
        """Run packed tokens [N] through the layers without gradients. Return [N, D]."""
        inputs = input_ids, position_ids, context
        layers = self.packed.layers
        if self.fused and isinstance(context, DecodeAttention):
            variant = {
                "model": type(self.policy.module).__name__,
                "dtype": self.policy.dtype,
                "merged": bool(self.copies),
            }
            check = partial(self.layers.difference, self.policy, *inputs)
            layers = self.layers if trusted("decode layers", input_ids.device, variant, check) else None
        with self.packed.in_use():
            return (layers or self.policy).states(*inputs)

    def release(self) -> None:
        """Release the gathered and packed weights."""
        self.packed.free()
        self.parameters, self.layers = [], None  # the layers refer to the gathered weights
        self.gathered.close()


def copied_bytes(policy: Policy) -> dict[int, int]:
    """Return the bytes of a copy of each group of layers with adapters or 4 bits, by the number of the group."""
    copied = {i: linears for i, linears in enumerate(groups(policy))
              if any(map(adapter_of, linears)) or isinstance(base_layer(linears[0]), NF4Linear)}  # fmt: skip
    size = policy.dtype.itemsize
    return {i: sum(each.in_features * each.out_features * size for each in linears) for i, linears in copied.items()}


def uses_kernels(policy: Policy) -> bool:
    """Return whether decode steps use the Triton kernels of `Layers`. On a GPU, log it once."""
    device = policy.device
    if device.type != "cuda":
        return False
    problem = obstacle(policy) or (None if HAS_TRITON and launch.runs_on(device) else "the GPU lacks the kernels")
    _log_once(problem)
    return problem is None


@cache
def _log_once(problem):
    logger.info("rollout layers on cuda: %s", f"transformers' ({problem})" if problem else "fused")
