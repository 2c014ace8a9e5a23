"""liger-kernel's fused layers, which launch fewer kernels and keep fewer activations for the backward pass."""

import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from fastgrpo.policy.device import package_obstacle

logger = logging.getLogger(__name__)


def apply_liger(model: PreTrainedModel, wanted: bool | None = None) -> bool:
    """Replace RMSNorm, rotary embedding and SwiGLU by liger-kernel's versions, if it has them. The head stays.

    Experts are not replaced either: liger's need a sync in every layer to count the tokens of each expert, which a CUDA
    graph capture does not allow. The rotary embedding is a function that all models of the architecture share.
    """
    obstacle = _obstacle(model, model.device) if wanted is not False else "not wanted"
    if wanted and model.device.type == "cpu":
        logger.warning("use_liger_kernel=True changes nothing on a CPU: head and loss are always fused")
    elif wanted and obstacle:
        raise ValueError(f"use_liger_kernel=True {obstacle}; omit use_liger_kernel to continue without")
    if obstacle:
        if wanted is None and model.device.type == "cuda":
            logger.warning("liger-kernel is not used, so layers are slower: it %s", obstacle)
        return False
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    torch.cuda.set_device(model.device)  # liger 0.8.0 launches on the current device
    of_classes = {kind.__module__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models.")}
    modules = {name: dict(vars(sys.modules[name])) for name in of_classes}
    swiglu = not any(parameter.ndim == 3 for parameter in model.parameters())  # 3-d parameters stack expert weights
    parts = {"rms_norm": True, "swiglu": swiglu, "cross_entropy": False, "fused_linear_cross_entropy": False}
    names = ["RMSNorm", "rotary embedding", *["SwiGLU"] * swiglu]
    try:
        _apply_liger_kernel_to_instance(model, rope=True, **parts)
    except NotImplementedError:  # for Qwen3.5 and GLM-4; raised before any replacement
        _apply_liger_kernel_to_instance(model, rope=False, **parts)
        names.remove("rotary embedding")
    for name, before in modules.items():
        _confine(vars(sys.modules[name]), before)
    logger.info("liger-kernel: fused %s for %s", " and ".join(names), model.config.model_type)
    return True


class Rotary(NamedTuple):
    """A rotary embedding: transformers' function for queries on a CPU, liger-kernel's for queries on a GPU."""

    original: Callable
    fused: Callable

    def __call__(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, with the arguments of transformers' function."""
        return (self.original if query.device.type == "cpu" else self.fused)(query, *args, **kwargs)


def _confine(names, before):
    """Restore what liger-kernel replaced in a module of transformers, so that it changes no other model's layers.

    The policy keeps its layers, which were replaced one by one. A function (the rotary embedding) is looked up in the
    module, so it becomes a `Rotary`.
    """
    from fastgrpo.kernels.launch import on_its_device

    for name, original in before.items():
        if names[name] is not original:
            keep = isinstance(original, (type, Rotary))
            names[name] = original if keep else Rotary(original, on_its_device(names[name]))


def would_apply(model: PreTrainedModel, wanted: bool | None, device: torch.device) -> bool:
    """Return whether `apply_liger` would replace the layers of a model on this device, or raise."""
    return wanted is not False and device.type != "cpu" and (bool(wanted) or _obstacle(model, device) is None)


def _obstacle(model, device):
    """Return why liger-kernel cannot be used for this model, as a predicate ("needs ..."), or None."""
    if device.type != "cuda":
        return f"needs a CUDA device; the model is on {device}"
    missing = package_obstacle("liger_kernel.transformers")
    if missing:
        return missing
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or later"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    name = model.config.model_type
    if name not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"does not support the architecture {name}, only {', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}"
    return None
