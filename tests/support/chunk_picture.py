"""Draws docs/pictures/chunk.png, the data's way through a chunk of the fused head: make pictures.

The figures in it are the shapes that `kernels/chunked.py` and `kernels/linear_grpo.py` compute with.
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from paths import ROOT

INPUT, WORK, OUTPUT = "#dbe9f6", "#fff2cc", "#dff0d8"
EDGE = "#444444"


def box(axes, x, y, width, height, title, text, color):
    """Draw one value or stage.

    Args:
        axes: What to draw on.
        x: Left edge, in units of the picture.
        y: Lower edge.
        width: Width.
        height: Height.
        title: First line, bold: the name and the shape.
        text: The lines below it.
        color: Fill.
    """
    patch = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", fc=color, ec=EDGE, lw=1.2)
    axes.add_patch(patch)
    axes.text(x + width / 2, y + height - 0.3, title, ha="center", va="center", fontsize=11, weight="bold")
    axes.text(x + width / 2, y + (height - 0.5) / 2, text, ha="center", va="center", fontsize=9.5, linespacing=1.45)


def arrow(axes, start, end, bend=0.0):
    """Draw an arrow between two points, with a bend of the given curvature."""
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=15, lw=1.4, color=EDGE, connectionstyle=style)
    )


def draw(path):
    """Draw the picture into a file.

    Args:
        path: The file to write, whose ending says its format.
    """
    figure, axes = plt.subplots(figsize=(11.5, 6.2), dpi=110)
    axes.set(xlim=(0, 17), ylim=(0, 9.2))
    axes.axis("off")
    # All tokens, of which one chunk is at work.
    axes.text(1.3, 8.85, "hidden [N, D]", ha="center", fontsize=11, weight="bold")
    for i in range(4):
        axes.add_patch(Rectangle((0.5, 7.45 - 1.05 * i), 1.6, 1.05, fc=INPUT if i != 1 else WORK, ec=EDGE, lw=1.2))
        axes.text(1.3, 7.97 - 1.05 * i, f"chunk {i + 1}", ha="center", va="center", fontsize=9.5)
    axes.text(1.3, 4.2, "tokens without\ngradient are left out", ha="center", va="top", fontsize=8.5)
    box(axes, 3.2, 7.2, 3.0, 1.5, "head W [V, D]", "bias and soft-cap\nwhere there are any", INPUT)
    box(axes, 3.0, 4.6, 3.6, 1.7, "logits z [C, V]", "fp32, one chunk alone\nz = H W$^T$ / T", WORK)
    box(axes, 7.3, 4.6, 3.3, 1.7, "log-prob [C]", "log-softmax, gather:\nz$_{target}$ - logsumexp(z)", WORK)
    box(
        axes,
        11.7,
        4.6,
        4.7,
        1.7,
        "loss of each token [C]",
        "ratio = exp(logp - old), clip,\n+ $\\beta$ KL to the reference",
        WORK,
    )
    box(
        axes,
        11.7,
        7.2,
        4.7,
        1.5,
        "old, ref, A, w [N]",
        "log-probs under old policy and\nreference, advantages, weights",
        INPUT,
    )
    box(
        axes,
        11.7,
        2.0,
        4.7,
        1.7,
        "g = dloss / dlogp [C]",
        "known as soon as logp is:\nnothing waits for other tokens",
        WORK,
    )
    box(
        axes,
        5.6,
        2.0,
        5.0,
        1.7,
        "dlogits [C, V], in place of z",
        "g (onehot - softmax(z)) / T\nthe same memory as the logits",
        WORK,
    )
    box(axes, 0.5, 0.6, 3.9, 1.2, "dH [N, D]", "dlogits W, of this chunk", OUTPUT)
    box(axes, 0.5, 2.15, 3.9, 1.2, "dW [V, D]", "+= dlogits$^T$ H, over chunks", OUTPUT)
    arrow(axes, (2.1, 6.9), (3.0, 5.7))
    arrow(axes, (4.7, 7.2), (4.7, 6.3))
    arrow(axes, (6.6, 5.45), (7.3, 5.45))
    arrow(axes, (10.6, 5.45), (11.7, 5.45))
    arrow(axes, (14.05, 7.2), (14.05, 6.3))
    arrow(axes, (14.05, 4.6), (14.05, 3.7))
    arrow(axes, (11.7, 2.85), (10.6, 2.85))
    arrow(axes, (4.9, 4.6), (6.3, 3.7))
    arrow(axes, (5.6, 3.0), (4.4, 2.8))
    arrow(axes, (5.6, 2.6), (4.4, 1.4))
    for i, (color, text) in enumerate([(INPUT, "given"), (WORK, "one chunk at a time"), (OUTPUT, "results")]):
        axes.add_patch(Rectangle((5.6 + 3.6 * i, 0.75), 0.45, 0.4, fc=color, ec=EDGE))
        axes.text(6.2 + 3.6 * i, 0.95, text, va="center", fontsize=9.5)
    axes.text(
        5.6, 0.25, "Logits [N, V] of all tokens never exist in memory.", fontsize=10.5, va="center", style="italic"
    )
    figure.savefig(path, bbox_inches="tight", pad_inches=0.1)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "pictures" / "chunk.png")
