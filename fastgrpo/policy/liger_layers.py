"""liger-kernel's fused layers in a model: fewer launches a layer, fewer activations kept for the backward pass."""

import logging
from importlib.util import find_spec

import torch

logger = logging.getLogger(__name__)


def apply_liger(model, wanted=None):
    """Replace RMSNorm, rotary embedding and SwiGLU by liger-kernel's; the head stays ours.

    Args:
        model: a causal LM, changed in place. The rotary embedding is replaced for its whole architecture: a copy made
            later, like the reference, computes the same. wanted: None is on GPUs, where liger-kernel is installed and
            knows the architecture.

    Returns:
        whether it was done.

    Raises:
        ValueError: it is wanted and cannot be had.
    """
    obstacle = _obstacle(model) if wanted is not False else "not wanted"
    if wanted and obstacle:
        raise ValueError(f"use_liger_kernel=True {obstacle}")
    if obstacle:
        return False
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    torch.cuda.set_device(model.device)  # its rotary embedding launches on the current device
    _apply_liger_kernel_to_instance(
        model, rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )
    logger.info("liger-kernel: fused RMSNorm, rotary embedding and SwiGLU for %s", model.config.model_type)
    return True


def _obstacle(model):
    """Why it cannot be done here, or None."""
    if model.device.type != "cuda":
        return f"needs a CUDA device; the model is on {model.device}"
    if find_spec("liger_kernel") is None:
        return "needs the package: pip install 'fastgrpo[liger]'"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    name = model.config.model_type
    if name not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"does not know the architecture {name}; it knows {', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}"
    return None
