"""Predicts the head's time on an H100 or H200 from its machine code.

    python -m benchmarks.predictions

prints the table of benchmarks/README.md. The head is three matrix products and the epilogue of the first one, which
turns logits into exponentials while no product runs:

    products = 128 x 256 x D / (2048 x 0.8)                      cycles of a tile of one product
    exposed  = max(2 x instructions, 128 x 256 / 16)             cycles of its epilogue
    head / three bare products = 1 + exposed / (3 x products)
    forward / one product      = 1 + exposed / products

A multiprocessor of compute capability 9.0 multiplies and adds 2,048 pairs of bf16 per cycle, of which cuBLAS reaches
about 80%. Each of its four schedulers issues one instruction per cycle for the 8 warps of a tile, so each instruction
of a warp costs 2 cycles. It computes 16 exponentials per cycle (CUDA C++ Programming Guide, throughput of native
arithmetic instructions). `make machine-code` counts the instructions (results/machine_code.json). Smaller kernels (the
anchor, sums over tiles, the policy loss) and the host are ignored, so measured ratios will be higher.
"""

import json

from benchmarks.bench_head import SHAPES, Shape
from benchmarks.compare import RESULTS

TRITON = "3.7.1"  # version with this machine code
TILE = 128, 256
PRODUCTS_A_CYCLE, REACHED = 2048, 0.8  # per multiprocessor of compute capability 9.0, in bf16
EXPONENTIALS_A_CYCLE, CYCLES_AN_INSTRUCTION = 16, 2


def exposed(kernel: str = "descriptor-90-base-stored") -> float:
    """Return the cycles of the epilogue of a tile, for a compilation in results/machine_code.json."""
    budget = json.loads((RESULTS / "machine_code.json").read_text())[TRITON][kernel]
    return max(CYCLES_AN_INSTRUCTION * budget["epilogue"], TILE[0] * TILE[1] / EXPONENTIALS_A_CYCLE)


def predicted(depth: int) -> tuple[float, float]:
    """Predict the ratios of bench_head.py for hidden states of width D = `depth`.

    Returns the time of forward and backward relative to three bare products, and of the forward relative to one.
    """
    products = TILE[0] * TILE[1] * depth / (PRODUCTS_A_CYCLE * REACHED)
    return 1 + exposed() / (3 * products), 1 + exposed("descriptor-90-base-forward-only") / products


def table(shapes: list[Shape] = SHAPES) -> str:
    """Format predictions and bars as a Markdown table, for shapes of bench_head.py with bars."""
    lines = [
        "| N x D x V | head / three bare products, predicted | bar | forward / one product, predicted | bar |",
        "|---|---|---|---|---|",
    ]
    for shape in shapes:
        if shape.step_bar:
            head, forward = predicted(shape.d)
            lines.append(
                f"| {shape.n} x {shape.d} x {shape.v} | {head:.3f} | {shape.step_bar:.2f} | {forward:.3f} | "
                f"{shape.forward_bar:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
