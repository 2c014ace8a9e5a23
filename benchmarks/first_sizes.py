"""The sizes of the parts of `make first-gpu`, and predictions made before the first run on a GPU."""

from benchmarks import bench_trl, predictions
from benchmarks.bench_head import SHAPES
from benchmarks.harness import SMALL

HEAD_SHAPES = SHAPES[: 1 if SMALL else 3]
STEP_SIZE = "0.8m" if SMALL else "0.5b"
# N, D and V of the first product with and without `flatten`, and of the loss in fp32.
FLATTEN_SIZES = ((40, 16, 70),) if SMALL else ((8192, 896, 151_936), (8192, 4096, 128_256))
# Rollouts: size, batches of prompts, new tokens, whether with LoRA, and the tokens/s predicted for an H100.
DECODE = {
    "0.5b, 256 lanes": ("0.5b", 1, 512, False, 125_000),
    "0.5b, 1024 lanes": ("0.5b", 4, 512, False, 165_000),
    "0.5b, 256 lanes, LoRA": ("0.5b", 1, 256, True, 53_000),
    "1.5b, 256 lanes": ("1.5b", 1, 256, False, 52_000),
    "7b, 256 lanes": ("7b", 1, 256, False, 22_000),
}
if SMALL:
    DECODE = {"embedded, 32 lanes": ("embedded", 2, 4, True, 1)}
TRL_BARS = [bench_trl.bar_name(name, case) for case in bench_trl.CASES for name in bench_trl.MEASURED.values()]


def size_name(size: tuple) -> str:
    """Return N, D and V, the first numbers of a tuple, as text."""
    return " x ".join(str(number) for number in size[:3])


def predicted_heads() -> dict[str, str]:
    """Return the ratios of the head predicted from machine code, by shape and bar."""
    found = {}
    for shape in () if SMALL else HEAD_SHAPES:
        step, forward = predictions.predicted(shape.d)
        found[f"{size_name(shape)}: time, of the bare products"] = f"{step:.3f}"
        found[f"{size_name(shape)}: forward time, of one product"] = f"{forward:.3f}"
    return found


# Predictions for an H200, not results: shape and bar -> ratio.
PREDICTED = predicted_heads()
