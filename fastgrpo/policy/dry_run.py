"""A dry run of the engine's passes on the meta device, which detects unsupported models at load time.

A copy of the model without weights computes only shapes: the prefill of two prompts and one decode step, through
`Policy.states` as in the engine. It checks that every layer attends once, through transformers' attention interface,
and passes our context on; that keys and values have the shapes of the slots in rollout/slots.py; and that there is no
sync, which a CUDA graph capture does not allow. Triton kernels, such as liger-kernel's, are not launched: their outputs
are allocated before the launch.

Shapes: N packed tokens, H query heads, K key heads, d head width.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from fastgrpo.loss.dispatch import HAS_TRITON
from fastgrpo.policy.attention import Unfit
from fastgrpo.policy.model import Policy, head_dim

# Tokens of each sequence in a prefill of two prompts, and in a decode step of two lanes.
PASSES = ((3, 2), (1, 1))
# Grouped matrix products of mixtures of experts: torch's operator, and transformers' fallback.
GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
WAITING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)  # operators that sync
_PATCHING = Lock()  # held while launches are patched, so that two threads restore them in order


class DryRun(NamedTuple):
    """The result of a dry run."""

    obstacle: str | None  # why the engine does not support the model, as a predicate such as "has attention sinks"
    grouped: bool  # whether the model uses grouped matrix products, as mixtures of experts do


def dry_run(model: PreTrainedModel) -> DryRun:
    """Check on the meta device whether the engine supports a model. Weights are neither read nor copied."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapped module
    obstacle, watch = _obstacle_of_config(model), OpTrace()
    if obstacle is None:
        try:
            _run(Policy(without_weights(model)), watch)
        except Unfit as error:
            obstacle = error.obstacle
        except Exception as error:  # the first rollout would raise the same
            reason = " ".join(str(error).split()).split(". ")[0][:200]
            obstacle = f"fails in the engine's forward pass ({type(error).__name__}: {reason})"
    return DryRun(obstacle, watch.grouped)


def _obstacle_of_config(model):
    """Return what would be computed wrongly although all shapes are right, or None."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    rope = getattr(config, "rope_parameters", None) or {}
    if not getattr(model, "_supports_attention_backend", False):
        return "does not use transformers' attention interface"
    if layer_types:
        return f"has layers that are not plain attention ({', '.join(sorted(layer_types))})"
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return f"has {rope['rope_type']} rotary frequencies, which follow the longest sequence of a batch"
    return None


def _run(policy, watch):
    """Run both passes of a policy without weights. Raises Unfit, or any exception of the model."""
    width, layers = head_dim(policy.shape), _cut(policy)
    longest = policy.longest or math.inf  # detects layers with a shorter window than the config's
    for lengths in PASSES:
        context = Shapes(width, longest)
        ids = torch.zeros(sum(lengths), dtype=torch.int64, device="meta")
        positions = torch.zeros_like(ids)
        with torch.no_grad(), watch, no_launches():
            policy.states(ids, positions, context)
        if len(context.layers) != layers:
            raise Unfit(f"has layers without attention ({layers - len(context.layers)} of the first {layers})")


@contextmanager
def no_launches() -> Iterator[None]:
    """Skip this thread's launches of Triton kernels within the context.

    A tensor on the meta device has address 0. A kernel that reads from it would break the CUDA context.
    """
    if not HAS_TRITON:
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    thread = get_ident()

    def unless_here(run):
        return lambda *args, **kwargs: None if get_ident() == thread else run(*args, **kwargs)

    with _PATCHING:
        runs = {kind: kind.run for kind in (JITFunction, Autotuner)}  # an autotuner would time skipped launches
        for kind, run in runs.items():
            kind.run = unless_here(run)
        try:
            yield
        finally:
            for kind, run in runs.items():
                kind.run = run


def _cut(policy):
    """Keep only the first layers of a copy, until every kind of layer is present. Return how many are kept."""
    count = policy.shape.num_hidden_layers
    modules = policy.module.base_model.modules()
    stacks = [module for module in modules if isinstance(module, torch.nn.ModuleList) and len(module) == count]
    if len(stacks) != 1:  # the layers cannot be identified
        return count
    kinds = [_kind(layer) for layer in stacks[0]]
    count = 1 + max(kinds.index(kind) for kind in set(kinds))
    del stacks[0][count:]
    return count


def _kind(layer):
    """Return the classes, plain attributes and shapes of a layer, which are equal for layers of one kind."""
    kind = []
    for name, module in layer.named_modules():
        plain = [(key, value) for key, value in vars(module).items() if isinstance(value, (bool, int, float, str))]
        plain = [(key, value) for key, value in plain if not key.startswith("layer_i")]  # layer_idx, layer_id
        shapes = [(key, weight.shape) for key, weight in module.named_parameters(recurse=False)]
        kind.append((name, type(module), tuple(plain), tuple(shapes)))
    return tuple(kind)


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model to the meta device, where tensors have shapes but no memory."""
    memo = {}
    for module in model.modules():
        # These include the dicts of its parameters and buffers, and tensors in other attributes.
        attributes = {name: value for name, value in vars(module).items() if name != "_modules"}
        for value in tree_leaves(attributes):
            if isinstance(value, torch.Tensor):
                empty = torch.empty_like(value, device="meta", requires_grad=False)
                is_parameter = isinstance(value, torch.nn.Parameter)
                memo[id(value)] = (
                    torch.nn.Parameter(empty, requires_grad=value.requires_grad) if is_parameter else empty
                )
    return copy.deepcopy(model, memo).eval()  # deepcopy takes the tensors from the memo


class Shapes:
    """A `Context` that computes nothing and checks the shapes of each layer's attention."""

    def __init__(self, width: int, longest: float) -> None:
        self.width, self.longest, self.layers = width, longest, set()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Check the shapes of one layer's attention, and return [N, H, d] without values."""
        if key.shape != value.shape:
            raise Unfit(f"has head dimension {key.shape[-1]} in keys and {value.shape[-1]} in values")
        if key.shape[-1] != self.width:
            raise Unfit(f"has head dimension {key.shape[-1]} in layer {layer}, but {self.width} in its config")
        if layer in self.layers:
            raise Unfit(f"attends more than once in layer {layer}")
        self.layers.add(layer)
        return query.transpose(0, 1).contiguous()


class OpTrace(TorchDispatchMode):
    """Inspects the operators of a forward pass on the meta device; `grouped` is True if one is a grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function._schema.name in GROUPED:  # on the meta device it supports bf16 only
            self.grouped = True
            return args[0].new_empty(len(args[0]), args[1].shape[-1])
        if _waits(function, args, kwargs):
            raise Unfit(f"syncs with the device in its forward pass ({function._schema.name})")
        return function(*args, **kwargs)


def _waits(function, args, kwargs):
    """Return whether an operator syncs with the device."""
    if function._schema.name == "aten::index":  # only the output shape of a mask depends on its values
        waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    else:
        device = kwargs.get("device")
        moves = device is not None and torch.device(device).type != "meta"
        waits = moves or any(tag in function.tags for tag in WAITING)
    return waits and any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs)))


NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = ("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok")


def unplannable(model: PreTrainedModel) -> str | None:
    """Return why the memory of a model's training cannot be computed, or None."""
    config = model.config.get_text_config()
    if model.get_output_embeddings() is None:
        return "is not a causal LM"
    if getattr(model, "is_quantized", False):  # of a folder, `read_config` has already raised
        return "has quantized weights"
    for name in (*NEEDED, *OPTIONAL):
        try:
            number = getattr(config, name, None)
        except RuntimeError:  # raised by transformers if layers differ, as for Gemma 4
            number = ()
        if not isinstance(number, int) and (name in NEEDED or number is not None):
            return f"has no {name} in its config that all layers share"
    return None
