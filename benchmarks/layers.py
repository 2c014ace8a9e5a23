"""liger-kernel's layers for all contestants of a benchmark or for none, so that a ratio compares only the engines."""

from importlib.util import find_spec

from benchmarks.harness import CUDA

LIGER = CUDA and find_spec("liger_kernel") is not None
LAYERS = "with liger's layers" if LIGER else "without liger's layers"  # part of the names of bars


def patch_classes(model_type: str) -> None:
    """Replace RMSNorm, rotary embedding and SwiGLU of an architecture in this process, as `apply_liger` does for ours.

    The head is not replaced. `model_type` is the architecture's name in transformers.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    MODEL_TYPE_TO_APPLY_LIGER_FN[model_type](
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )
