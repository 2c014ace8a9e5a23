"""The sizes of the parts of `make first-gpu`, and what was predicted for them before anything had run on a GPU."""

from benchmarks import bench_trl, predictions
from benchmarks.bench_head import SHAPES
from benchmarks.harness import SMALL

HEAD_SHAPES = SHAPES[: 1 if SMALL else 3]
ROLLOUT_SIZE, STEP_SIZE = ("embedded", "0.8m") if SMALL else ("0.5b", "0.5b")
# N, D and V of the first product with and without `flatten`, and of the loss in fp32.
FLATTEN_SIZES = ((40, 16, 70),) if SMALL else ((8192, 896, 151_936), (8192, 4096, 128_256))
TRL_BARS = [bench_trl.bar_name(name, case) for case in bench_trl.CASES for name in bench_trl.MEASURED.values()]


def size_name(size: tuple) -> str:
    """Return N, D and V as results have them.

    Args:
        size: A tuple that begins with the three numbers.
    """
    return " x ".join(str(number) for number in size[:3])


def predicted_heads() -> dict[str, str]:
    """Return what the machine code says of the head: the bar, after its shape -> the ratio."""
    found = {}
    for shape in () if SMALL else HEAD_SHAPES:
        step, forward = predictions.predicted(shape.d)
        found[f"{size_name(shape)}: time, of the bare products"] = f"{step:.3f}"
        found[f"{size_name(shape)}: forward time, of one product"] = f"{forward:.3f}"
    return found


# For an H200. The bar, after its shape or size -> the ratio or range. These are predictions, no results.
PREDICTED = {
    **predicted_heads(),
    "0.5b: share of the bandwidth limit, with liger's layers": "0.34 to 0.37",
    "0.5b: share of the bandwidth limit, without liger's layers": "0.22 to 0.25",
}
